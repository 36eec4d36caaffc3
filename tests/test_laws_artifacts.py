"""Laws of envelope and manifest: whatever the bytes are, the answer is entries that stay inside, or a refusal."""

from __future__ import annotations

import contextlib
import posixpath

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynapolicy.artifacts.envelope import Entry, Layout, pack, parse, safe_key
from dynapolicy.artifacts.manifest import Manifest, Part, differences
from dynapolicy.errors import ArtifactRefused
from strategies import LAW

layouts = st.builds(Layout, checksum=st.booleans(), base64=st.booleans(), grouped=st.booleans())
keys = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20) | st.sampled_from(
    ["ab/cd.so", "triton/x/kernel.cubin", "a" * 60, "local:0:tag"]
)
bad_keys = st.sampled_from(
    ["/etc/passwd", "../x", "a/../../x", "..", ".", "", "a//b", "a\\..\\b", "C:/x", "a\0b", "x/"]
)
kinds = st.sampled_from(["0", "1", "2", "3"])
entries = st.lists(st.builds(Entry, kinds, keys, st.binary(max_size=40)), max_size=6)


def plain(found):
    return sorted((one.kind, one.key, bytes(one.content)) for one in found)


@LAW
@given(entries, layouts)
def test_parse_is_the_inverse_of_pack(some, layout):
    """In every layout that some torch has."""
    assert plain(parse(pack(some, layout), layout)) == plain(some)


@LAW
@given(entries.filter(bool), layouts, st.data())
def test_a_truncated_envelope_is_refused_or_ends_between_entries(some, layout, data):
    """Never an endless loop, and never a shortened entry."""
    whole = pack(some, layout)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        found = plain(parse(cut, layout))
    except ArtifactRefused:
        return
    assert all(one in plain(some) for one in found)


@LAW
@given(st.binary(max_size=300), layouts)
def test_any_bytes_are_entries_inside_or_a_refusal(data, layout):
    """No other exception, whatever the bytes."""
    try:
        found = parse(data, layout)
    except ArtifactRefused:
        return
    assert all(safe_key(one.key) for one in found)


@LAW
@given(entries.filter(bool), layouts, st.data())
def test_one_flipped_byte_never_leaves_the_folder(some, layout, data):
    """A flip in a length, a key or a count gives entries inside, or a refusal."""
    whole = bytearray(pack(some, layout))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = parse(bytes(whole), layout)
    except ArtifactRefused:
        return
    assert all(safe_key(one.key) for one in found)


@LAW
@given(entries, bad_keys, layouts)
def test_a_key_that_leaves_the_folder_is_refused(some, bad, layout):
    """Absolute, with .. in it, empty, of another system."""
    with pytest.raises(ArtifactRefused):
        parse(pack([*some, Entry("0", bad, b"x")], layout), layout)


@LAW
@given(st.text(max_size=30))
def test_a_safe_key_stays_below_any_folder(key):
    """By the oracle of path arithmetic."""
    assume(safe_key(key))
    assert posixpath.normpath(posixpath.join("/root/cache", key)) == f"/root/cache/{key}"


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4)
fields = st.dictionaries(st.text("abc", min_size=1), json_values)


GUARD = {"guard": "ID_MATCH", "name": "G['f']", "scope": "m", "object": "o", "rebindable": True, "entry": ""}


@LAW
@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4), st.binary(max_size=8))
def test_a_manifest_comes_back_as_it_was_signed(fit, key):
    """With and without a key; another key refuses it."""
    part = Part.of("blob", b"some bytes")
    manifest = Manifest(name="m", mode="default", fit=fit, parts=(part,), saved=1.5, guards=(GUARD,))
    data = manifest.to_bytes(key)
    assert Manifest.from_bytes(data, key or None) == manifest
    with pytest.raises(ArtifactRefused):
        Manifest.from_bytes(data, key + b"x")


@LAW
@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode) | st.just(b'{"hmac": "", "format": 1}'))
def test_any_bytes_are_no_manifest(data):
    """Refused, and nothing else raised."""
    with pytest.raises(ArtifactRefused):
        Manifest.from_bytes(data, None)


@LAW
@given(st.data(), st.sampled_from([b"key", None]))
def test_one_flipped_byte_of_a_manifest_is_refused(data, key):
    """Signed or not. Or it changes nothing that the manifest says, such as the case of a hexadecimal escape."""
    part = Part.of("blob", b"x")
    manifest = Manifest(name="m", mode="default", fit={"torch": "2"}, parts=(part,), saved=1.5, guards=(GUARD,))
    whole = bytearray(manifest.to_bytes(key))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ArtifactRefused):
        assert Manifest.from_bytes(bytes(whole), key) == manifest


@LAW
@given(st.sampled_from(sorted(GUARD)), json_values)
def test_a_guard_with_another_field_is_damage(field, value):
    """Nothing later meets a guard that lacks a field, or has one of another type."""
    assume(type(value) is not type(GUARD[field]))
    for guard in ({**GUARD, field: value}, {one: GUARD[one] for one in GUARD if one != field}, {**GUARD, "x": value}):
        data = Manifest(name="m", mode="default", fit={}, parts=(), saved=1.5, guards=(guard,)).to_bytes(None)
        with pytest.raises(ArtifactRefused, match="damaged"):
            Manifest.from_bytes(data, None)


@LAW
@given(fields, fields)
def test_differences_are_empty_exactly_for_equal_fields(one, other):
    """And each differing field is named once."""
    differing = {name for name in {*one, *other} if one.get(name) != other.get(name)}
    assert len(differences(one, other)) == len(differing)
