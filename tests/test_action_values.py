"""What a Q-network says of actions that do the same."""

import numpy as np
import pytest
from conftest import ROOT, assert_refused

import sac_procgen as sac
from common import envs
from experiments import action_values, records


def test_actions_that_do_the_same_are_found():
    """In starpilot all letters but A shoot forwards."""
    groups = action_values.same_actions(envs.GameArgs(env_id="starpilot"), games=4, seed=0)
    assert groups == [*([i] for i in range(9)), [9, 11, 12, 13, 14], [10]]


def test_spreads_by_hand():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 15))
    groups = [[0], [3], [4, 9, 11], *([i] for i in (1, 2, 5, 6, 7, 8, 10, 12, 13, 14))]
    centred = values - values.mean(axis=0)
    among = [np.var([row[4], row[9], row[11]], ddof=1) for row in centred]
    others = [np.var(np.delete(row, [9, 11]), ddof=1) for row in centred]
    means = [sum(row[i] for row in values) / 6 for i in (4, 9, 11)]
    np.testing.assert_allclose(
        action_values.spreads(values, groups),
        (np.mean(among) ** 0.5, np.mean(others) ** 0.5, np.var(means, ddof=1) ** 0.5),
        rtol=1e-12,
    )
    liked = np.tile(rng.normal(size=15), (6, 1))  # by as much on every frame
    np.testing.assert_allclose(
        action_values.spreads(liked, groups), (0, 0, np.std(liked[0, [4, 9, 11]], ddof=1)), atol=1e-12
    )


def test_a_run_gets_a_row(tmp_path):
    run = sac.main(
        sac.Args(
            env_id="starpilot", encoder="nature", width=1, pool="flatten", hidden=16, num_envs=4, num_steps=16,
            num_devices=1, buffer_size=320, learning_starts=100, batch_size=16, total_timesteps=256, eval_episodes=0,
            wandb_mode="disabled", run_dir=str(tmp_path),
        )
    )  # fmt: skip
    args = action_values.Args((str(run.path),), games=2, steps=6, out=str(tmp_path / "values"))
    (row,) = action_values.main(args)
    assert (row["game"], row["do the same"]) == ("starpilot", "D W S Q E")
    assert 0 < float(row["spread among these"]) < 0.1
    (written,) = records.read_rows(tmp_path / "values.csv")
    assert int(written["step"]) == int(row["step"]) >= 256


@pytest.mark.parametrize(
    ("words", "names", "valid"),
    [
        ([], "RUN_DIRS", "at least one"),
        (["agents/ppo_bigfish"], "RUN_DIR", "runs of apex_procgen.py or sac_procgen.py"),
        (["agents/sac_coinrun"], "RUN_DIR", "no complete checkpoint"),
        (["--games", "0"], "--games 0", "from 1 to 1024"),
    ],
)
def test_what_has_no_values_is_refused(words, names, valid, capfd):
    words = [str(ROOT / word) if word.startswith("agents") else word for word in words]
    assert_refused(action_values, words, capfd, names, valid)
