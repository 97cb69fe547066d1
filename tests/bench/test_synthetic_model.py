"""Synthetic models: reproducible, valid, with the routing and the text that they promise."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from colibri_bench.cmd_bench import main
from colibri_bench.synthetic_model import expert_ranks, greedy_cycle, write_model
from colibri_bench.synthetic_shape import SHAPES, plan_skew, shape_of
from colibri_bench.synthetic_weights import generator, q4_k, q8_0, q8_0_value
from colibri_format import StorageError, UsageError
from colibri_repack import repack
from colibri_runtime import RunConfig, Runtime

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    write_model(path, TINY, 7)
    return path


class _Picks:
    """Counts the picks of experts among a layer's hottest quarter."""

    n_hot = n_all = 0

    def routed(self, layer, first_position, experts, weights, predicted):
        ranks = expert_ranks(TINY, 7, layer)[experts]
        self.n_hot += int((ranks <= TINY.n_experts // 4).sum())
        self.n_all += ranks.size


@pytest.fixture(scope="module")
def passed(tiny, tmp_path_factory):
    """What the runtime makes of the greedy text: tokens, logits after each, picks."""
    output = tmp_path_factory.mktemp("repacked") / "tiny.colibri"
    repack(tiny, output)
    tokens = [5]
    for _ in range(199):
        tokens.append(int(greedy_cycle(TINY, 7)[tokens[-1]]))
    picks = _Picks()
    with Runtime.open(output, RunConfig(memory_bytes=2**28), observer=picks) as runtime:
        return tokens, runtime.decoder.forward(tokens, all_logits=True), picks


def test_greedy_text_follows_the_cycle(passed):
    tokens, logits, _ = passed

    assert logits.argmax(axis=1)[:-1].tolist() == tokens[1:]
    best = np.sort(logits, axis=1)[:, -2:]
    assert np.min(best[:, 1] - best[:, 0]) > 1  # no rounding turns that round


def test_routing_is_as_skewed_as_promised(passed):
    picks = passed[2]

    assert picks.n_hot / picks.n_all == pytest.approx(0.57, abs=0.06)


def test_cycle_passes_every_token_once():
    follows = greedy_cycle(TINY, 3)
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = int(follows[token])

    assert token == 0
    assert len(seen) == TINY.vocab_size


def test_same_seed_gives_the_same_bytes(tiny, tmp_path):
    write_model(tmp_path / "again.gguf", TINY, 7)
    write_model(tmp_path / "other.gguf", TINY, 8)

    assert (tmp_path / "again.gguf").read_bytes() == tiny.read_bytes()
    assert (tmp_path / "other.gguf").read_bytes() != tiny.read_bytes()


def test_weights_have_the_mean_and_deviation_asked_for():
    for make, dtype in (
        (q8_0, GGMLQuantizationType.Q8_0),
        (q4_k, GGMLQuantizationType.Q4_K),
    ):
        blocks = make(generator(1, "weights"), 256, 1024, 0.02)
        values = dequantize(blocks.reshape(256, -1), dtype)

        assert values.std() == pytest.approx(0.02, rel=0.02)
        assert abs(values.mean()) < 0.02 / 100


def test_experts_add_nothing_to_the_constant_channel(tiny):
    down = next(t for t in GGUFReader(tiny).tensors if t.name == "blk.1.ffn_down_exps.weight")
    values = dequantize(down.data, down.tensor_type)

    assert not values[:, 0].any()
    assert values[:, 1].any()


def test_value_beyond_the_blocks_scale_is_refused():
    with pytest.raises(ValueError, match="beyond"):
        q8_0_value(1.0, 1.8)


def test_skew_grows_with_the_share_asked_for():
    assert plan_skew(TINY, 0.3) < plan_skew(TINY, 0.57) < plan_skew(TINY, 0.9)


def test_existing_file_stays(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"mine")

    with pytest.raises(StorageError) as caught:
        write_model(path, TINY)

    assert caught.value.code == "file-exists"
    assert path.read_bytes() == b"mine"


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(StorageError) as caught:
        write_model(tmp_path / "absent" / "model.gguf", TINY)

    assert caught.value.code == "file-not-found"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"), [(("huge",), "unknown-shape"), (("olmoe", 0), "bad-layers")]
)
def test_shapes_that_cannot_be_are_refused(arguments, code):
    with pytest.raises(UsageError) as caught:
        shape_of(*arguments)

    assert caught.value.code == code


def test_command_writes_the_model(tmp_path, capsys):
    path = tmp_path / "model.gguf"

    assert main(["model", str(path), "--shape", "tiny", "--layers", "1"]) == 0
    assert "1 layers of 16 experts" in capsys.readouterr().out
    assert path.exists()
