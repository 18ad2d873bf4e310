"""Agents as small files: exported, they play as their run does; those in agents/ fit the scripts."""

import importlib
import json
import shutil
from unittest.mock import create_autospec

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy
import yaml
from conftest import ROOT, assert_refused
from test_scripts import FLAGS, train

import evaluate
import hnppo_doorgym as hn
import rnd_montezuma as rnd
from common import agents, devices, files, networks, runs
from common.rewards import ReturnFilter


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Its agent is small enough to be exported in float32."""
    return train("apex_procgen", tmp_path_factory.mktemp("run"), total_timesteps=200, hidden=8, wandb_entity="us")


def export(run_dir, folder, *words):
    runs.cli(evaluate.Args, evaluate.main, [str(run_dir), *words, "--export", str(folder)])


def test_an_exported_agent_plays_as_its_run_does(run_dir, tmp_path):
    folder, words = tmp_path / "agent", ["--episodes", "2", "--seed", "3"]
    export(run_dir, folder, *words)
    content = json.loads((folder / "args.json").read_text())
    content["args"] |= {"total_timesteps": 100}
    del content["args"]["track"]
    (folder / "args.json").write_text(json.dumps(content))  # exported earlier in the run, by an older script
    export(run_dir, folder, *words)
    both = evaluate.main(evaluate.Args((str(folder), str(run_dir)), episodes=2, seed=3))
    assert both[0] == both[1]
    exported, saved = (json.loads((path / "eval.json").read_text()) for path in (folder, run_dir))
    assert exported == saved
    exported = json.loads((folder / "args.json").read_text())
    assert (exported["args"]["run_dir"], exported["args"]["wandb_entity"]) == ("runs", "")
    assert exported["env_id"] == FLAGS["apex_procgen"]["env_id"]
    assert (folder / agents.FILE).stat().st_size < 2e6


@pytest.mark.parametrize("name", ["ppo_procgen", "impala_procgen", "rnd_montezuma"])
def test_a_policy_with_a_core_remembers_until_its_episode_ends(name):
    """Step by step, as it is played, it comes to what its network makes of the whole sequence."""
    script = importlib.import_module(name)
    encoder = {} if script is rnd else {"encoder": "nature", "frame_stack": 1}
    args = script.Args(channels="4,4,4", hidden=8, core="gru", num_devices=1, **encoder)
    side, depth = (84, 4) if script is rnd else (64, 3)
    frames = np.random.default_rng(0).integers(0, 256, (3, 2, side, side, depth), np.uint8)  # steps, games
    episode_steps, key = np.int32([[0, 4], [1, 5], [2, 0]]), jax.random.PRNGKey(1)
    agent, start = script.make_agent(args), networks.init_hidden_state("gru", 8, 2)
    params = agent.init(jax.random.PRNGKey(0), frames[0], episode_steps[0] == 0, start)
    encoded = [agent.apply(params, frame, method="encode") for frame in frames]
    features = jax.tree.map(lambda *x: np.stack(x, axis=1), *encoded)
    *_, whole = agent.apply(params, features, episode_steps.T == 0, start, method="decode")
    policy, hidden_state = script.make_policy(args, agent, devices.make_mesh(args)), None
    for frame, episode_step in zip(frames, episode_steps, strict=True):
        _, hidden_state = policy(params, frame, episode_step, key, hidden_state)
    np.testing.assert_allclose(hidden_state[0], whole[0], rtol=1e-4, atol=1e-6)
    _, newest = policy(params, frames[2], episode_steps[2], key, None)
    continued, reset = np.abs(newest[0] - hidden_state[0]).max(axis=1)
    assert continued > 0.01
    assert reset < 1e-5


def test_large_agents_are_stored_as_float16_where_that_holds_their_numbers(tmp_path):
    about = {"script": "ppo_procgen", "args": {}}
    large, few = np.float32(np.random.default_rng(0).normal(size=(600, 600))), np.float32([1 / 3])
    agents.write(tmp_path, about, {"a": {"large": large, "few": few}, "n": np.int32(7)})
    tree = agents.read(tmp_path / agents.FILE)
    assert tree["a"]["large"].dtype == np.float16
    np.testing.assert_allclose(tree["a"]["large"], large, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(tree["a"]["few"], few)
    assert tree["n"].shape == ()
    wide = np.full(300_000, 1e5, np.float32)  # beyond float16; and a fork's tree may have more than dicts
    agents.write(tmp_path, about, {"filter": ReturnFilter(wide, few, few, few)})
    np.testing.assert_array_equal(agents.read(tmp_path / agents.FILE)["filter"]["discounted"], wide)
    agents.write(tmp_path, about, {"a": {"large": large[:50, :50]}})
    np.testing.assert_array_equal(agents.read(tmp_path / agents.FILE)["a"]["large"], large[:50, :50])


def test_an_agent_that_is_damaged_or_of_other_flags_is_refused(run_dir, tmp_path, capfd):
    export(run_dir, tmp_path, "--episodes", "1")
    content = json.loads((tmp_path / "args.json").read_text())
    unsigned = {name: value for name, value in content.items() if name != "sha256"}  # an older agent
    other = unsigned | {"args": content["args"] | {"hidden": 16}}
    path, whole = tmp_path / agents.FILE, (tmp_path / agents.FILE).read_bytes()
    unreadable = safetensors.numpy.save({"a": np.zeros(1), "a/b": np.zeros(1)})  # impossible names
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for args, data, why in (
        (other, whole, "does not fit"),
        (content, flipped, "SHA-256"),
        (unsigned, whole[:100], "cannot be read"),
        (unsigned, unreadable, "cannot be read"),
    ):
        path.write_bytes(data)
        files.write_json(tmp_path / "args.json", args)
        capfd.readouterr()
        assert_refused(evaluate, [str(tmp_path)], capfd, str(tmp_path), why)


# THE HUB


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the hub, a folder, with the signatures of huggingface_hub's own."""

    def upload_folder(repo_id, folder_path, allow_patterns):
        shutil.copytree(folder_path, tmp_path / repo_id, ignore=lambda _, names: set(names) - set(allow_patterns))

    def upload_file(repo_id, path_in_repo, path_or_fileobj):
        (tmp_path / repo_id / path_in_repo).write_bytes(path_or_fileobj)

    api = create_autospec(huggingface_hub.HfApi)
    api.return_value.create_repo.side_effect = lambda repo_id, exist_ok: f"hub/{repo_id}"
    api.return_value.upload_folder.side_effect = upload_folder
    api.return_value.upload_file.side_effect = upload_file
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    return api.return_value


@pytest.fixture
def bigfish(tmp_path):
    return shutil.copytree(ROOT / "agents" / "ppo_bigfish", tmp_path / "bigfish")


@pytest.mark.slow
def test_an_agent_goes_to_the_hub_with_a_card(bigfish, tmp_path, hub, capfd):
    (bigfish / "README.md").write_text("mine")
    runs.cli(evaluate.Args, evaluate.main, [str(bigfish), "--episodes", "2", "--push-to-hub", "me/bigfish"])
    assert "uploaded: hub/me/bigfish" in capfd.readouterr().out
    hub.create_repo.assert_called_once_with("me/bigfish", exist_ok=True)
    there = tmp_path / "me" / "bigfish"
    assert {path.name for path in there.iterdir()} == {agents.FILE, "args.json", "eval.json", "README.md"}
    assert (bigfish / "README.md").read_text() == "mine"
    _, head, text = (there / "README.md").read_text().split("---\n", 2)
    (result,) = yaml.safe_load(head)["model-index"][0]["results"]
    entry = json.loads((there / "eval.json").read_text())["test_levels"]
    assert [x["value"] for x in result["metrics"]] == [round(entry["mean_return"], 3)]
    row = f"| test levels | mean return | {entry['mean_return']:.2f} | {entry['std']:.2f} | {entry['episodes']} |"
    assert row in text


def test_a_card_names_the_game_and_the_scores(tmp_path):
    doors = agents.card(ROOT / "agents" / "hnppo_six_doors", "me/doors")
    assert "# HNPPO on DoorGym" in doors
    assert doors.count("| success rate |") == doors.count("|  | 100 |\n") == 6
    assert "for 10,878,976 decisions, on hard doors with a hook;" in doors
    args = rnd.Args()
    runs.write_json(tmp_path / "args.json", {"script": rnd.SCRIPT, "env_id": args.env_id, "args": vars(args)})
    runs.write_json(tmp_path / "eval.json", {"global_step": 5, "room": {"mean_return": 0.0, "std": 0.0, "episodes": 2}})
    assert f"# RND on {rnd.Args.env_id}\n" in agents.card(tmp_path, "me/rnd")
    runs.write_json(tmp_path / "args.json", {"script": "my_spo", "env_id": "maze", "args": {}})
    assert "# MY SPO on maze\n" in agents.card(tmp_path, "me/spo")
    text = agents.card(ROOT / "agents" / "ppo_bigfish", "me/x")
    assert "| test levels | mean return | 25.12 | 17.09 | 512 |" in text
    assert ", on all levels of the easy game" in text
    assert not agents.results({"random_test_levels": {"mean_return": 1.0, "std": 0.0, "episodes": 2}})


@pytest.mark.parametrize(
    ("words", "names", "valid"),
    [
        (["--push-to-hub", "bigfish"], "--push-to-hub bigfish", "OWNER/NAME"),
        (["--push-to-hub", "me/a--b"], "--push-to-hub me/a--b", "OWNER/NAME"),
        (["--push-to-hub", "me/bigfish", "--random"], "--push-to-hub", "--random"),
        (["--human"], "--human", "trained on all levels"),
    ],
)
def test_an_agent_is_refused_for_what_it_cannot_do(bigfish, hub, capfd, words, names, valid):
    assert_refused(evaluate, [str(bigfish), *words], capfd, names, valid)
    assert not hub.create_repo.called


def test_a_run_is_not_pushed_and_not_exported_over_another(run_dir, bigfish, hub, tmp_path, capfd):
    doors = str(ROOT / "agents" / "hnppo_six_doors")
    assert_refused(evaluate, [str(run_dir), "--push-to-hub", "me/x"], capfd, "--push-to-hub me/x", "--export")
    assert_refused(evaluate, [str(run_dir), "--export", str(run_dir)], capfd, f"--export {run_dir}", "run directory")
    assert_refused(evaluate, [str(run_dir), "--export", str(bigfish)], capfd, f"--export {bigfish}", "of another run")
    assert_refused(evaluate, [doors, "--human"], capfd, "--human", "without levels")
    assert_refused(evaluate, [doors, "--levels", "train"], capfd, "--levels train", "hnppo_doorgym.py")
    content, own = runs.read_args(str(run_dir), ""), runs.read_args(str(bigfish), "")
    for script_run, there in (
        (run_dir, content | {"run": "another, of the same flags"}),
        (bigfish, own | {"args": own["args"] | {"seed": 77}}),
    ):
        runs.write_json(tmp_path / "args.json", there)
        words = [str(script_run), "--export", str(tmp_path)]
        assert_refused(evaluate, words, capfd, f"--export {tmp_path}", "of another run")
    runs.write_json(tmp_path / "args.json", content | {"args": content["args"] | {"num_levels": "ten"}})
    assert_refused(evaluate, [str(tmp_path), "--human"], capfd, f"RUN_DIR {tmp_path}", "args.json")


def test_a_user_who_is_not_logged_in_is_told_before_anything_is_played(bigfish, hub, monkeypatch, capfd):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert_refused(evaluate, [str(bigfish), "--push-to-hub", "me/x"], capfd, "--push-to-hub me/x", "hf auth login")


def test_a_hub_that_cannot_be_reached_is_answered_in_one_sentence(bigfish, hub):
    hub.create_repo.side_effect = ConnectionError("no route\nto it")
    (bigfish / "eval.json").write_text('{"global_step": 1}')
    with pytest.raises(files.FailedError, match=r"--push-to-hub me/x: no route \("):
        agents.push(bigfish, "me/x")


# AGENTS/


@pytest.mark.parametrize("folder", sorted((ROOT / "agents").glob("*/args.json")), ids=lambda path: path.parent.name)
def test_the_agents_that_come_with_the_scripts_fit_them(folder):
    script, args = evaluate.script_of(str(folder.parent))
    tree = script.load_params(args, script.make_agent(args), str(folder.parent))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree))
    assert (folder.parent / agents.FILE).stat().st_size < 2e6


def test_one_network_still_opens_six_doors():
    """As long as neither the physics nor the order of its weights change."""
    run_dir = str(ROOT / "agents" / "hnppo_six_doors")
    args = runs.saved_args(hn.Args, run_dir, "RUN_DIR")
    played = hn.evaluate(args, run_dir, episodes=4, seed=0, levels="", random=False, video=False)
    rates = [row["success_rate"] for row in played.rows]
    assert len(rates) == 6
    assert min(rates) >= 0.75
