#!/usr/bin/env bash
# All 16 games x seeds at 8M steps with the competition's setting, to one number (its normalisation): an evening on a GPU.
# Stopped and started again it goes on. What is after the name goes to the script, settings are variables:
#
#   benchmarks/all_games.sh ppo_procgen.py
#   GAMES="bigfish coinrun" SEEDS="1 2" OUT=runs/quick benchmarks/all_games.sh ppo_procgen.py --total-timesteps 100000
set -euo pipefail
script=${1:?name a script: benchmarks/all_games.sh ppo_procgen.py}
shift
games=${GAMES:-bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja plunder starpilot}
seeds=${SEEDS:-1 2 3}
out=${OUT:-runs/all_games}
python=${PYTHON:-python}

trap 'exit 130' INT TERM
for seed in $seeds; do
  for game in $games; do
    folder=$out/${script%.py}/$game/$seed
    if [ -e "$folder/done" ]; then continue; fi
    mkdir -p "$folder"
    run=$(find "$folder" -mindepth 3 -maxdepth 3 -path '*/checkpoints/[0-9]*' -print -quit)
    if [ -n "$run" ]; then
      "$python" "$script" --resume "$(dirname "$(dirname "$run")")" 2>&1 | tee -a "$folder/output.txt"
    else
      "$python" "$script" --env-id "$game" --seed "$seed" --run-dir "$folder" "$@" 2>&1 | tee -a "$folder/output.txt"
    fi
    # A script that was asked to stop exits with 0, too.
    if tail -n 1 "$folder/output.txt" | grep -q '^stopped by'; then exit 130; fi
    touch "$folder/done"
  done
done
"$python" benchmarks/plot.py "$out/${script%.py}"/*/*/*__*/ --aggregate --out "$out/${script%.py}/all_games"
