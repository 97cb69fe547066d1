"""Rows of embeddings: the same whether they are in memory or stay in the file."""

import os
from dataclasses import replace

import numpy as np
import pytest

import colibri_format
from colibri_format import FormatError, ModelSpec, StorageError, UsageError
from colibri_runtime.backend import Matrix
from colibri_runtime.numpy_backend import NumpyBackend
from colibri_runtime.row_table import FileTable, ResidentTable
from colibri_runtime.weights import EMBEDDING, load_weights, resident_bytes
from helpers.random_colibri import make_model, write_random_colibri


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.colibri"
    model = make_model(n_layers=1, hidden=64, width=64, n_experts=2, top_k=1)
    write_random_colibri(path, replace(model, tie_embeddings=False))
    return path


def test_rows_from_the_file_are_those_of_the_whole(path):
    with colibri_format.open(path) as reader:
        tensor = reader.tensor(EMBEDDING)
        table = FileTable(EMBEDDING, tensor)
        whole = tensor.read()
        ids = np.array([5, 0, 5, *range(40), tensor.shape[0] - 1])

        rows = table.rows(NumpyBackend(), ids)

    matrix = Matrix(EMBEDDING, tensor.dtype, tensor.shape, whole)
    np.testing.assert_array_equal(rows, NumpyBackend().rows(matrix, ids))


def test_untied_embeddings_take_no_memory(path):
    with colibri_format.open(path) as reader:
        model: ModelSpec = colibri_format.parse_model(
            reader.read_file(colibri_format.MODEL_FILE), str(path)
        )
        assert not model.tie_embeddings
        layouts = [(reader.layout(0),)]
        weights = load_weights(reader, model, NumpyBackend())
        all_bytes = sum(tensor.size for tensor in reader.tensors.values())

        assert isinstance(weights.embedding, FileTable)
        stated = resident_bytes(reader.tensors, model, layouts)
        assert stated <= all_bytes - reader.tensors[EMBEDDING].size + 64 * len(reader.tensors) + 64


def test_damaged_table_is_found_before_it_is_used(path):
    with colibri_format.open(path) as reader:
        offset = reader.tensor(EMBEDDING).offset
    data = bytearray(path.read_bytes())
    data[offset + 9] ^= 1
    path.write_bytes(data)

    with colibri_format.open(path) as reader, pytest.raises(FormatError) as caught:
        FileTable(EMBEDDING, reader.tensor(EMBEDDING))

    assert caught.value.code == "tensor-checksum"


def test_file_cut_short_while_open_is_told(path):
    with colibri_format.open(path) as reader:
        table = FileTable(EMBEDDING, reader.tensor(EMBEDDING))
        os.truncate(path, reader.tensor(EMBEDDING).offset)

        with pytest.raises(StorageError) as caught:
            table.rows(NumpyBackend(), np.array([1]))

    assert caught.value.code == "short-read"


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (0, 10**9), (10**9, 1)])
def test_parts_outside_a_tensor_are_refused(path, start, size):
    with colibri_format.open(path) as reader, pytest.raises(UsageError) as caught:
        reader.tensor(EMBEDDING).read_part_into(start, bytearray(min(size, 10**8)))

    assert caught.value.code == "bad-buffer"


def test_resident_rows_come_from_the_backend():
    class _Backend:
        def rows(self, matrix, ids):
            return matrix, list(ids)

    assert ResidentTable("matrix").rows(_Backend(), [1, 2]) == ("matrix", [1, 2])
