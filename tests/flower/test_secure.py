"""Under SecAgg+ the server sees sums alone, off by no more than the stated error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flower_parties import CLIENTS, InProcess, plan, run
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fedstat.fl import optim
from fedstat.flower import SecureGrid, error_bound
from fedstat.flower.plan import arrays_in, to_record
from fedstat.flower.secure import RANGES, entry_ranges, moment_ranges, secure_mod, steps


def masked(said):
    """What a party sent in place of its arrays, or None."""
    configs = said.answer.content.config_records.get(RECORD_KEY_CONFIGS, {})
    return [bytes_to_ndarray(b) for b in configs[Key.MASKED_PARAMETERS]] if Key.MASKED_PARAMETERS in configs else None


def trained(grid):
    return [s for s in grid.said if s.asked.metadata.message_type == MessageType.TRAIN]


def summed(values, r, parties=None):
    """The sum over parties of ``values`` (party, ...) by SecAgg+, and all that was said."""
    chosen = plan("fedavg", secure=True)
    app = ClientApp(mods=[secure_mod(lambda _: chosen)])

    @app.train()
    def train(message, context):
        own = to_record({"x": values[context.node_config["partition-id"]]})
        return Message(RecordDict({"sums": own}), reply_to=message)

    grid = InProcess(app, len(values) if parties is None else parties)
    content = {RANGES: ConfigRecord({"x": r})}
    asked = [Message(RecordDict(dict(content)), node, MessageType.TRAIN) for node in grid.get_node_ids()]
    (answer,) = SecureGrid(grid).send_and_receive(asked, timeout=5)
    return arrays_in(answer.content, "sums")["x"], grid


@pytest.mark.parametrize("parties", [3, 4, 7])
@pytest.mark.parametrize("r", [2.0**-20, 1.0, 1024.0])
def test_a_secure_sum_is_off_by_less_than_its_bound_up_to_the_ends_of_its_range(parties, r):
    rng = np.random.default_rng(parties)
    values = rng.uniform(-r, r, size=(parties, 300))
    values[:, 0], values[:, 1], values[:, 2] = r, -r, 0.0
    total, _ = summed(values, r)
    error = np.abs(total - values.sum(0))
    assert error.max() < error_bound(parties, r)
    assert error.max() > error_bound(parties, r) / 1000  # it is fixed point


def test_the_number_of_steps_is_the_largest_without_overflow():
    for parties in range(2, 2000):
        t = steps(parties)
        assert parties * t < 2**32
        assert t == 2**30 or 2 * parties * t >= 2**32


def test_the_server_cannot_read_one_partys_moments():
    strategy, grid = run(plan("fedfac-dynamic", secure=True), rounds=1)
    openly, plain = run(plan("fedfac-dynamic"), rounds=1)
    own = [arrays_in(s.answer.content, "sums") for s in trained(plain)[:CLIENTS]]
    seen = [masked(s) for s in trained(grid) if masked(s) is not None]
    assert len(seen) == 2 * CLIENTS  # moments, then shared entries
    for party, arrays in enumerate(seen[:CLIENTS]):
        true = np.concatenate([np.ravel(a) for a in own[party].values()])
        given = np.concatenate([a.ravel() for a in arrays[1:]])  # the first is the weight, 1 for all
        assert given.size == true.size
        # Numbers that say nothing: uniform, and unrelated to the moments.
        assert stats.kstest(given / 2**32, "uniform").pvalue > 1e-6
        assert abs(np.corrcoef(given, true)[0, 1]) < 5 / np.sqrt(true.size)
    # Nothing else in any answer holds a value of the party, but keys, shares of keys, and the weight 1.
    for said in trained(grid):
        content = said.answer.content
        assert not any(a.numpy().size for r in content.array_records.values() for a in r.values() if a.data)
        assert all(list(r.values()) == [1] for r in content.metric_records.values())
        for values in content.config_records[RECORD_KEY_CONFIGS].values():
            assert not isinstance(values, float)
    # Yet their sums are those of the open run.
    for layer, fit in openly.rounds[0].mask.fits.items():
        np.testing.assert_allclose(strategy.rounds[0].mask.fits[layer].communality, fit.communality, atol=1e-5)


def test_masks_are_new_in_every_sum():
    values = np.zeros((3, 50))
    first, second = (masked(next(s for s in summed(values, 1.0)[1].said if masked(s)))[1] for _ in range(2))
    assert (first != second).mean() > 0.9


def test_ranges_follow_the_values_and_are_powers_of_two():
    server = {"a": torch.tensor([0.5, -3.0]), "b": torch.tensor([0.01])}
    assert entry_ranges(server, ["a", "b"], 0.25, 4.0) == {"a": 4.0, "b": 0.25}
    one = {"fc1/n": np.array([6.0]), "fc1/total": np.zeros(2), "fc1/square": np.array([0.2, -0.1, 0.5])}
    assert moment_ranges(one, 2.0) == {"fc1/n": 8.0, "fc1/total": 4.0, "fc1/square": 2.0}


def test_a_value_out_of_range_is_one_line_that_names_the_array_and_not_the_value():
    values = np.full((3, 5), 0.5)
    values[1, 3] = 1.7
    with pytest.raises(RuntimeError, match=r"a value of 'x' lies outside ±1, .*Raise headroom") as caught:
        summed(values, 1.0)
    assert "1.7" not in str(caught.value)


def test_a_run_out_of_range_says_which_party_and_array():
    steep = optim.sgd(30.0)
    with pytest.raises(RuntimeError, match=r"^client \d: a value of 'fc\d\.\w+' lies outside .*Raise headroom"):
        run(plan("fedavg", secure=True, optimizer=steep, local_epochs=1), rounds=2)


def test_where_nothing_is_shared_there_is_nothing_to_sum():
    strategy, grid = run(plan("local", secure=True), rounds=1)
    assert all(len(masked(s)) == 1 for s in trained(grid) if masked(s) is not None)  # the weight, 1 for all
    assert np.isfinite(strategy.scores[0]["accuracy"]).all()
