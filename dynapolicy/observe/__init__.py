"""See what holds: per setting, per code object, per place."""
