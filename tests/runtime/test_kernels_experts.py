"""A layer's experts in one call of C: the same as one by one, in any order and any company."""

import numpy as np
import pytest

from colibri_format import DTYPES
from colibri_runtime.native_kernels import (
    EXPERT,
    EXPERT_IO,
    KernelError,
    NativeKernels,
    aligned_bytes,
)
from helpers.kernel_calls import decoded, isas, matmul, matrix_record, runtime_library, stored
from helpers.quant_bytes import random_rows

HIDDEN, INTERMEDIATE, N_TOKENS = 128, 320, 11


@pytest.fixture(scope="module")
def library():
    return runtime_library()


@pytest.fixture
def kernels(library):
    with NativeKernels(library, n_threads=2) as made:
        yield made


class Network:
    """Random matrices of one expert, as stored and decoded."""

    def __init__(self, seed, types=("q4_0", "q4_0", "q8_0"), form=0, with_bias=False):
        shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN),
                  "down": (HIDDEN, INTERMEDIATE)}  # fmt: skip
        self.types, self.form = types, form
        self.data, self.weights, self.records, self.biases = {}, {}, {}, {}
        rng = np.random.default_rng(seed)
        for (role, shape), name in zip(shapes.items(), types, strict=True):
            rows = random_rows(DTYPES[name], *shape, seed=seed)
            self.data[role] = stored(rows, DTYPES[name], shape[1], form)
            self.weights[role] = decoded(rows, name, shape[1])
            self.records[role] = matrix_record(self.data[role], DTYPES[name], *shape, form)
            if with_bias:
                self.biases[role] = rng.standard_normal(shape[0]).astype(np.float32)

    def fill(self, record, tokens, places):
        for role in ("gate", "up", "down"):
            record[role] = self.records[role]
            if role in self.biases:
                record[f"{role}_bias"] = self.biases[role].ctypes.data
        record["tokens"] = 0 if tokens is None else tokens.ctypes.data
        record["places"] = 0 if places is None else places.ctypes.data

    def compute(self, kernels, x):
        """Through single products and NumPy."""
        gate = self.product(kernels, "gate", x)
        up = self.product(kernels, "up", x)
        return self.product(kernels, "down", gate / (1 + np.exp(-gate)) * up)

    def product(self, kernels, role, x):
        bias = self.biases.get(role)
        name = self.types[("gate", "up", "down").index(role)]
        rows = len(self.weights[role])
        return matmul(kernels, x, self.data[role], DTYPES[name], rows, self.form, bias)


def run(kernels, networks, x, tokens, places, n_places):
    """`out`, `(n_places, HIDDEN)`, 12345 where nothing was written."""
    experts = np.zeros(len(networks), EXPERT)
    for record, network, of_expert, to in zip(experts, networks, tokens, places, strict=True):
        network.fill(record, of_expert, to)
        record["n_tokens"] = len(x) if of_expert is None else len(of_expert)
    out = np.full((n_places, HIDDEN + 5), np.float32(12345))
    io = np.zeros(1, EXPERT_IO)
    io["x"], io["x_stride"], io["n_tokens"] = x.ctypes.data, x.shape[1], len(x)
    io["out"], io["out_stride"], io["n_places"] = out.ctypes.data, out.shape[1], n_places
    kernels.experts(experts, io, aligned_bytes(kernels.experts_workspace(experts, io)))
    assert (out[:, HIDDEN:] == 12345).all()
    return out[:, :HIDDEN]


def tokens_of(n_tokens=N_TOKENS, seed=7):
    return np.random.default_rng(seed).standard_normal((n_tokens, HIDDEN)).astype(np.float32)


def i32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("types", "form"),
    [
        (("q4_0", "q4_0", "q8_0"), 0),
        (("q4_0", "q4_0", "q8_0"), 16),
        (("q8_0", "q5_1", "mxfp4"), 16),
        (("q8_0", "q4_1", "f16"), 0),
        (("f32", "f32", "f32"), 0),
    ],
)
def test_an_expert_is_its_three_products(library, types, form, with_bias):
    network = Network(3, types, form, with_bias)
    x = tokens_of()
    for isa in isas(library):
        with NativeKernels(library, isas=isa) as kernels:
            got = run(kernels, [network], x, [None], [None], N_TOKENS)
            expected = network.compute(kernels, x)

        # The activation differs by some units in the last place, which may move a value to the
        # next integer when it is rounded: 1/254 of the group's largest.
        assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()
        if types[0] == "f32":
            assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_gathered_tokens_and_given_places_are_those_of_single_calls(kernels):
    networks = [
        Network(seed, ("q8_0", types, "q4_0")) for seed, types in enumerate(["q8_0", "q4_1", "f16"])
    ]
    x = tokens_of()
    tokens = [i32(2, 9), i32(0, 5, 3, 3, 10, 1, 7, 8, 4, 6), i32(4, 5, 6)]
    places = [i32(20, 3), i32(*range(4, 14)), i32(0, 1, 2)]

    together = run(kernels, networks, x, tokens, places, 22)

    untouched = sorted(set(range(22)) - {place for to in places for place in to})
    assert (together[untouched] == 12345).all()
    for network, of_expert, to in zip(networks, tokens, places, strict=True):
        for token, place in zip(of_expert, to, strict=True):
            alone = run(kernels, [network], x[token : token + 1], [None], [None], 1)
            assert (together[place] == alone[0]).all()


def test_results_do_not_depend_on_order_or_threads(library):
    networks = [Network(seed) for seed in range(4)]
    x = tokens_of()
    tokens = [i32(*((np.arange(5) * 3 + seed) % N_TOKENS)) for seed in range(4)]
    places = [i32(*(np.arange(5) * 4 + seed)) for seed in range(4)]
    results = []
    for n_threads in (1, 2, 5):
        with NativeKernels(library, n_threads=n_threads) as kernels:
            results.append(run(kernels, networks, x, tokens, places, 20))
            results.append(run(kernels, networks[::-1], x, tokens[::-1], places[::-1], 20))

    assert all((result == results[0]).all() for result in results)


def test_experts_without_tokens_are_no_work(kernels):
    networks = [Network(0), Network(1), Network(2)]
    x = tokens_of(2)

    got = run(kernels, networks, x, [i32(), i32(1), i32()], [i32(), i32(0), i32()], 1)

    assert (got == run(kernels, [networks[1]], x[1:], [None], [None], 1)).all()
    assert (run(kernels, networks[:1], x, [i32()], [i32()], 1) == 12345).all()
    kernels.experts(np.zeros(0, EXPERT), np.zeros(1, EXPERT_IO), aligned_bytes(0))


def test_many_tokens_go_through_the_team(kernels):
    network = Network(5)
    x = tokens_of(700)
    tokens = np.arange(699, -1, -1, dtype=np.int32)

    got = run(kernels, [network], x, [tokens], [None], 700)

    assert (got[123] == run(kernels, [network], x[123:124], [None], [None], 1)[0]).all()


def test_activation_of_large_values_is_right(kernels):
    network = Network(3, ("f32", "f32", "f32"))
    x = tokens_of(4) * np.float32(100)
    gate = x.astype(np.float64) @ network.weights["gate"].T
    assert np.abs(gate).max() > 1000

    got = run(kernels, [network], x, [None], [None], 4)

    with np.errstate(over="ignore"):
        hidden = gate / (1 + np.exp(-gate)) * (x @ network.weights["up"].T)
    expected = hidden @ network.weights["down"].T
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("token", [-1, N_TOKENS])
def test_tokens_and_places_out_of_range_are_refused(kernels, token):
    network = Network(0)
    with pytest.raises(KernelError, match="EINVAL") as raised:
        run(kernels, [network], tokens_of(), [i32(0, token)], [i32(0, 1)], 4)
    assert raised.value.code == "bad-product"
    with pytest.raises(KernelError, match="EINVAL"):
        run(kernels, [network], tokens_of(), [i32(0, 1)], [i32(0, token)], N_TOKENS)


def test_matrices_that_do_not_fit_together_are_refused(kernels):
    network = Network(0)
    for role, rows in (("gate", 64), ("up", 64), ("down", 64)):
        broken = Network(0)
        data, _, columns, ggml_type, form = network.records[role]
        broken.records[role] = (data, rows, columns, ggml_type, form)
        with pytest.raises(KernelError, match="EINVAL"):
            run(kernels, [broken], tokens_of(), [None], [None], N_TOKENS)
    broken = Network(0)
    broken.records["down"] = (*network.records["down"][:3], 99, 0)
    with pytest.raises(KernelError, match=r"ENOTSUP|EOPNOTSUPP"):
        run(kernels, [broken], tokens_of(), [None], [None], N_TOKENS)


def test_small_workspace_is_refused(kernels):
    network, x = Network(0), tokens_of()
    experts, io, out = np.zeros(1, EXPERT), np.zeros(1, EXPERT_IO), np.zeros_like(x)
    network.fill(experts[0], None, None)
    experts["n_tokens"] = len(x)
    io["x"], io["x_stride"], io["n_tokens"] = x.ctypes.data, HIDDEN, len(x)
    io["out"], io["out_stride"], io["n_places"] = out.ctypes.data, HIDDEN, len(x)
    size = kernels.experts_workspace(experts, io)

    with pytest.raises(KernelError, match="ENOSPC"):
        kernels.experts(experts, io, aligned_bytes(size)[: size - 64])
    with pytest.raises(KernelError, match="EINVAL"):
        kernels.experts(experts, io, aligned_bytes(size + 64)[4:])
    io["x_stride"] = HIDDEN - 1
    with pytest.raises(KernelError, match="EINVAL"):
        kernels.experts_workspace(experts, io)


@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize("with_weights", [True, False])
def test_outputs_are_summed_by_rank_as_numpy_does(library, with_weights, adds):
    mix = library.function(
        "colibri_mix", "i32", "ptr", "i64", "ptr", "i64", "i32", "i64", "ptr", "i64", "i32"
    )  # fmt: skip
    rng = np.random.default_rng(1)
    outputs = rng.standard_normal((3, 4, 500)).astype(np.float32)
    weights = rng.uniform(0, 1, (3, 4)).astype(np.float32)
    mixed = rng.standard_normal((3, 510)).astype(np.float32)
    before = mixed.copy()
    mix(outputs.ctypes.data, 500, weights.ctypes.data if with_weights else 0, 3, 4, 500,
        mixed.ctypes.data, 510, adds)  # fmt: skip

    products = outputs * weights[:, :, np.newaxis] if with_weights else outputs
    expected = products[:, 0].copy()
    for rank in range(1, 4):
        expected += products[:, rank]
    if adds:
        expected = before[:, :500] + expected
    assert (mixed[:, :500] == expected).all()
    assert (mixed[:, 500:] == before[:, 500:]).all()
