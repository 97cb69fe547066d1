"""Quick ways through headers find what the slow ones find, and refuse what those refuse."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_repack import SourceError
from colibri_repack.families.names import split_name, take_column
from colibri_repack.sources.files import InputFiles
from colibri_repack.sources.json_object import MAX_INDEX_VALUES, parse_object
from colibri_repack.sources.safetensors_header import parse_compact, parse_safetensors_header
from colibri_repack.sources.safetensors_index import parse_plain_map

SHAPES = ([2, 3], [6], [], [0, 4], [1, 1, 6])


def header(names: list[str], shapes: list[list[int]]) -> dict[str, dict[str, object]]:
    record: dict[str, dict[str, object]] = {}
    position = 0
    for name, shape in zip(names, shapes, strict=False):
        size = 2
        for length in shape:
            size *= length
        offsets = [position, position + size]
        record[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        position += size
    return record


def compact(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def write(path: Path, text: str) -> Path:
    """A file with that header, and as much data as it says."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        ends = [entry["data_offsets"][1] for k, entry in json.loads(text).items() if k[0] != "_"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        ends = []
    n_bytes = max((end for end in ends if type(end) is int and end < 2**20), default=0)
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(n_bytes))
    return path


def outcome(path: Path) -> object:
    """The tensors of `path`, or the code that it is refused with."""
    files = InputFiles()
    try:
        return parse_safetensors_header(files, path)
    except SourceError as error:
        return error.code
    finally:
        files.close()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(
    names=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=5, max_size=5),
    has_metadata=st.booleans(),
    padding=st.integers(0, 9),
)
def test_compact_headers_say_what_their_json_says(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    shapes: list[list[int]],
    has_metadata: bool,
    padding: int,
) -> None:
    folder = tmp_path_factory.mktemp("h")
    record: dict[str, object] = {"__metadata__": {"a": 'b":{"dtype'}} if has_metadata else {}
    record |= header([name for name in names if name != "__metadata__"], shapes)
    text = compact(record) + " " * padding

    quick = write(folder / "m.safetensors", text)
    found = outcome(quick)
    # A space behind the first brace makes it a header for the general way.
    slow = outcome(write(folder / "m.safetensors", "{ " + text[1:]))

    assert isinstance(found, dict) == isinstance(slow, dict)
    if isinstance(found, dict) and isinstance(slow, dict):
        assert [t._replace(offset=0) for t in found.values()] == [
            t._replace(offset=0) for t in slow.values()
        ]


@given(
    at=st.integers(0, 400),
    what=st.sampled_from(list('",:{}[]0123e.-x\\ \tt_')),
    is_insert=st.booleans(),
)
def test_a_header_with_one_sign_changed_is_taken_or_refused_alike(
    tmp_path_factory: pytest.TempPathFactory, at: int, what: str, is_insert: bool
) -> None:
    folder = tmp_path_factory.mktemp("h")
    good = compact(
        {"__metadata__": {"format": "pt"}} | header(["a.0.w", "a.1.w", "b"], list(SHAPES))
    )
    at %= len(good)
    text = good[:at] + what + good[at + (not is_insert) :]
    path = write(folder / "m.safetensors", text)
    files = InputFiles()

    quick = parse_compact(path, text.encode(), 8 + len(text))
    try:
        record = parse_object(text.encode(), "h", "bad", 1000)
    except SourceError:
        record = None
    files.close()

    if quick is not None:
        assert record is not None
        record.pop("__metadata__", None)
        assert [(t.name, t.shape, t.size) for t in quick] == [
            (name, tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0])
            for name, e in record.items()
        ]


def test_the_form_that_safetensors_writes_is_read_quickly(tmp_path: Path) -> None:
    text = compact({"__metadata__": {"format": "pt"}} | header(["a", "b"], list(SHAPES))) + "   "

    assert parse_compact(tmp_path, text.encode(), 0) is not None


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a":{"b":1,"b":1}}',
        '{"x":[{"a":1,"a":2}]}',
        '{"a:":1,"a:":2}',
        '{"{":{"a":1,"a":2}}',
        '{"a":1,"\\u0061":2}',
    ],
)
def test_keys_that_stand_twice_are_found_wherever_they_are(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_object(text.encode(), "h", "bad", 1000)

    assert caught.value.code == "bad"


@pytest.mark.parametrize("text", ['{"a:b":{"c{":[{"d":1},{"d":1}]}}', "{}", '{"a":[[],{}]}'])
def test_signs_of_json_inside_strings_and_arrays_are_no_second_keys(text: str) -> None:
    assert parse_object(text.encode(), "h", "bad", 1000) == json.loads(text)


def plain_index(weight_map: dict[str, str], indent: int | None = 2) -> str:
    return json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map}, indent=indent)


@given(
    at=st.integers(0, 400),
    what=st.sampled_from(list('",:{}[]0\\ \n\t\x0bab')),
    is_insert=st.booleans(),
)
def test_an_index_with_one_sign_changed_says_what_its_json_says(
    at: int, what: str, is_insert: bool
) -> None:
    good = plain_index({"a.w": "m-1", "b.w": "m-1", "c": "m-2"})
    at %= len(good)
    text = good[:at] + what + good[at + (not is_insert) :]

    quick = parse_plain_map(text.encode())

    if quick is not None:
        assert parse_object(text.encode(), "i", "bad", 1000)["weight_map"] == quick


def test_the_form_in_which_hubs_write_an_index_is_read_quickly() -> None:
    weight_map = {f"layers.{n}.weight": f"model-{n % 3}.safetensors" for n in range(20)}

    assert parse_plain_map(plain_index(weight_map).encode()) == weight_map
    assert parse_plain_map((plain_index({"a": "b"}) + "\n").encode()) == {"a": "b"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"weight_map": {}}',
        plain_index({"a": "b"})[:-2],
        plain_index({"a": "b"}).replace('"metadata"', '"weight_map"'),
        plain_index({"a": "b", "c": "b"}).replace('"c"', '"a"'),
        plain_index({"a": "\x1f"}),
        '{,"weight_map": {"a": "b"}}',
        plain_index({"a": "é"}),
        plain_index({"a": "b", "c": "d"}).replace('"d"', "1"),
    ],
)
def test_any_other_index_is_left_to_the_json_parser(text: str) -> None:
    assert parse_plain_map(text.encode()) is None


def test_a_shape_of_countless_lengths_is_not_cut_apart() -> None:
    text = b'{"a":{"dtype":"F32","shape":[' + b"00," * 10**6 + b'0],"data_offsets":[0,0]}}'

    tracemalloc.start()
    found = parse_compact(Path("m"), text, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert found is None
    assert peak < 8 * len(text)


def test_an_index_of_quotes_alone_is_not_cut_apart() -> None:
    text = '{"weight_map": {"' + '"' * (4 * MAX_INDEX_VALUES + 1) + '"}}'

    assert parse_plain_map(text.encode()) is None


def test_a_column_of_names_is_taken_whole() -> None:
    left = {f"l.{layer}.e.{n}.w": (layer, n) for layer in (0, 1) for n in range(3)} | {"x": (9, 9)}

    assert take_column(left, "l.{}.e.{}.w", 1, 3) == [(1, 0), (1, 1), (1, 2)]
    assert sorted(left) == ["l.0.e.0.w", "l.0.e.1.w", "l.0.e.2.w", "x"]


@pytest.mark.parametrize("n", [0, 4, 2**60])
def test_a_column_that_lacks_a_name_is_left(n: int) -> None:
    left = {f"l.0.e.{number}.w": number for number in range(3)}

    assert take_column(left, "l.{}.e.{}.w", 0, n) == []
    assert len(left) == 3


@pytest.mark.parametrize(
    "name", ["blk.{}.a", "blk.3.{x}", "{", "a}.1.weight", "blk.3.ffn.2.weight"]
)
def test_templates_and_numbers_give_the_name_back(name: str) -> None:
    template, numbers = split_name(name)

    assert template.format(*numbers) == name
