"""Any geometry comes back; any flipped bit and any cut is caught, or changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import colibri_format as cf
from colibri_format.header import Region
from helpers.forge import Forge, fill, layout_of, write_sample

DTYPES = st.sampled_from([cf.DTYPES[n] for n in ("f32", "bf16", "q8_0", "q4_k", "mxfp4")])
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="/\\:"),
    min_size=1,
    max_size=20,
).filter(lambda name: name not in (".", ".."))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(codec="utf-8"), max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def plans(draw: st.DrawFn) -> cf.FilePlan:
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    layouts: list[cf.Layout | None] = []
    present = np.zeros((n_layers, n_experts), np.bool_)
    for layer in range(n_layers):
        experts = draw(st.sets(st.integers(0, n_experts - 1)))
        present[layer, sorted(experts)] = True
        dtype = draw(DTYPES)
        width = dtype.block_elements * draw(st.integers(1, 2))
        layouts.append(layout_of(dtype.name, width, width) if experts else None)
    tensors = [
        cf.TensorSpec(
            name,
            dtype := draw(DTYPES),
            (draw(st.integers(0, 3)), dtype.block_elements * draw(st.integers(0, 2))),
            draw(st.none() | st.integers(0, n_layers - 1)),
        )
        for name in draw(st.sets(NAMES, max_size=4))
    ]
    files = [
        cf.FileSpec(name, draw(st.integers(0, 200))) for name in draw(st.sets(NAMES, max_size=3))
    ]
    return cf.plan_layout(
        n_layers=n_layers,
        n_experts=n_experts,
        layer_layouts=layouts,
        present=present,
        alignment=2 ** draw(st.integers(12, 14)),
        tensors=tensors,
        files=files,
        metadata=draw(
            st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, max_size=4)
        ),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(), seed=st.integers(0, 2**32))
def test_any_geometry_comes_back(
    plan: cf.FilePlan, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("round") / "a.colibri"
    with cf.Writer(path, plan) as writer:
        written = fill(writer, seed)

    with cf.open(path) as file:
        assert (file.index == plan.index).all()
        assert file.layouts == plan.layouts
        assert [f.name for f in plan.files] == list(file.files)
        assert {t.name: (t.dtype, t.shape, t.layer) for t in plan.tensors} == {
            t.name: (t.dtype, t.shape, t.layer) for t in file.tensors.values()
        }
        assert contents(file) == written
        assert file.verify() == []


def contents(file: cf.Reader) -> dict[str, bytes]:
    """Everything in the file that a user can read, by place."""
    found: dict[str, Any] = {}
    for layer, expert in np.argwhere(file.index["size"] != 0).tolist():
        handle = file.expert(layer, expert)
        block = handle.read()
        found[f"L{layer}/E{expert}"] = b"".join(
            block[s.offset : s.offset + s.size].tobytes() for s in handle.segments
        )
    found |= {f"tensor {name}": file.tensor(name).read().tobytes() for name in file.tensors}
    found |= {f"file {name}": file.read_file(name) for name in file.files}
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, Any]]:
    path = tmp_path_factory.mktemp("small") / "small.colibri"
    layout = layout_of("q8_0", 32, 32)
    plan = cf.plan_layout(
        n_layers=2,
        n_experts=2,
        layer_layouts=[layout, layout],
        tensors=[
            cf.TensorSpec("a", cf.DTYPES["f32"], (3,), 0),
            cf.TensorSpec("b", cf.DTYPES["f32"], (2, 3)),
        ],
        files=[cf.FileSpec("x.json", 30)],
        metadata={"k": [1, 2, {"n": None}]},
    )
    write_sample(path, plan)
    with cf.open(path) as file:
        return path, path.read_bytes(), facts(file)


def facts(file: cf.Reader) -> dict[str, Any]:
    return contents(file) | {
        "index": file.index.tobytes(),
        "layouts": file.layouts,
        "metadata": file.metadata,
        "uuid": file.uuid,
        "tensors": dict(file.tensors),
        "files": dict(file.files),
    }


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_caught_or_changes_nothing(
    data: st.DataObject, small: tuple[Path, bytes, dict[str, Any]]
) -> None:
    path, sound, known = small
    # Half of the flips hit bytes that say something; most of a small file is padding.
    meaningful = [n for n in range(0, len(sound), 7) if sound[n]]
    place = data.draw(st.sampled_from(meaningful) | st.integers(0, len(sound) - 1))
    broken = bytearray(sound)
    broken[place] ^= 1 << data.draw(st.integers(0, 7))
    target = path.with_name("flipped.colibri")
    target.write_bytes(broken)

    try:
        with cf.open(target) as file:
            found = file.verify()
            assert facts(file) == known
    except cf.FormatError as error:
        assert error.code
    else:
        assert found, f"byte {place} changed unnoticed"


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 10**9))
def test_any_cut_is_refused(length: int, small: tuple[Path, bytes, dict[str, Any]]) -> None:
    path, sound, _ = small
    target = path.with_name("cut.colibri")
    target.write_bytes(sound)
    os.truncate(target, length % len(sound))

    with pytest.raises(cf.FormatError) as caught:
        cf.open(target)

    assert caught.value.code in ("truncated", "file-too-small")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_bytes_with_right_checksums_are_refused_or_sound(
    data: st.DataObject, small: tuple[Path, bytes, dict[str, Any]]
) -> None:
    path, sound, _ = small
    forge = Forge(sound)
    region = data.draw(st.sampled_from([0, 1, 4, 5]))
    length = forge.superblock.regions[region].length
    place = data.draw(st.integers(0, length - 1))
    value = data.draw(st.binary(min_size=1, max_size=8))[: length - place]
    forge.patch_region(Region(region), place, value)
    target = forge.write(path.with_name("forged.colibri"))

    try:
        with cf.open(target) as file:
            file.verify()
    except (cf.FormatError, cf.StorageError) as error:
        assert error.code
