"""Run what was declared: warm up, freeze, recover."""
