#!/usr/bin/env bash
# All 16 games x seeds with a script's defaults (8M steps, PPG 25M), to one number (normalised as train-procgen does):
# for PPO six to nine hours on an H100. Needs rliable (make .venv/with-dev). Stopped or killed, the same command
# resumes. Words after the script's name are its flags; games, seeds and folder are environment variables:
#
#   experiments/all_games.sh ppo_procgen.py
#   GAMES="bigfish coinrun" SEEDS="1 2" OUT=runs/quick experiments/all_games.sh ppo_procgen.py --total-timesteps 100000
set -euo pipefail
set -m # each script in a process group of its own, so that a Ctrl-C reaches it once, through us
script=${1:?name a script: experiments/all_games.sh ppo_procgen.py}
shift
games=${GAMES:-bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja plunder starpilot}
seeds=${SEEDS:-1 2 3}
out=${OUT:-runs/all_games}/${script%.py}
python=${PYTHON:-python}
flags="$*"

if ! command -v "$python" > /dev/null; then
  echo "error: PYTHON=$python: is no command, give a Python that has the scripts' packages" >&2
  exit 2
fi
if ! "$python" -c 'import rliable' 2> /dev/null; then
  echo "error: PYTHON=$python: has no rliable, run make .venv/with-dev" >&2
  exit 2
fi
mkdir -p "$out"
if [ -e "$out/flags" ] && [ "$(cat "$out/flags")" != "$flags" ]; then
  echo "error: $out has runs with the flags '$(cat "$out/flags")', not '$flags': give another OUT" >&2
  exit 2
fi

# The scripts inherit this lock: one that has outlived us keeps it.
exec 9> "$out/lock"
if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null; then
  echo "error: $out: another process is still at it; wait for it, or give another OUT" >&2
  exit 2
fi

printf '%s' "$flags" > "$out/flags"
stopped=
child=
trap 'stopped=1; waiting=1; [ -z "$child" ] || kill -TERM "$child" || true' INT TERM HUP
failed=
runs=()
for seed in $seeds; do
  for game in $games; do
    if [ -n "$stopped" ]; then exit 130; fi
    folder=$out/$game/$seed
    if [ ! -e "$folder/done" ]; then
      mkdir -p "$folder"
      checkpoint=$(find "$folder" -mindepth 3 -maxdepth 3 -path '*/checkpoints/[0-9]*' ! -name '*.*' -print -quit)
      if [ -n "$checkpoint" ]; then
        words=(--resume "$(dirname "$(dirname "$checkpoint")")")
      else
        words=(--env-id "$game" --seed "$seed" --run-dir "$folder" "$@")
      fi
      echo "$game, seed $seed: see $folder/output.txt"
      "$python" "$script" "${words[@]}" > "$folder/output.txt" 2>&1 &
      child=$!
      [ -z "$stopped" ] || kill -TERM "$child" || true
      waiting=1
      while [ -n "$waiting" ]; do # a signal ends bash's wait early
        waiting=
        code=0
        wait "$child" || code=$?
      done
      child=
      if [ -n "$stopped" ]; then exit 130; fi
      if [ "$code" -ne 0 ] || grep -q '^stopped by' "$folder/output.txt"; then
        echo "$game, seed $seed: failed or stopped (exit code $code)"
        failed=1
        continue
      fi
      sed -n 's/^run directory: \(.*\), devices: .*/\1/p' "$folder/output.txt" > "$folder/done.tmp"
      mv "$folder/done.tmp" "$folder/done"
    fi
    runs+=("$(cat "$folder/done")")
  done
done
if [ -n "$failed" ]; then
  echo "error: some runs failed, see above; the same command tries them again" >&2
  exit 1
fi
"$python" -m experiments.plot "${runs[@]}" --aggregate --out "$out/all_games"
