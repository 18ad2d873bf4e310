#!/usr/bin/env bash
# Runs on one GPU (benchmarks/TODO.md): trials, speed, curves and games, or those that are named; results go to $OUT.
# FROM=DIR continues the runs of curves and games that an earlier session left in DIR.
# To try it on a CPU: JAX_PLATFORMS=cpu UPDATES=1 FLAGS="--num-envs 16 --num-steps 4 --num-minibatches 8
# --update-epochs 1 --total-timesteps 256" benchmarks/gpu_session.sh
set -u
cd "$(dirname "$0")/.."
out=${OUT:-runs/gpu_session} flags=${FLAGS:-} started=0
mkdir -p "$out"
[ -z "${FROM:-}" ] || cp -r "$FROM/." "$out"

speed() {  # flags, then variants, which run in turns; ratios are to the first
  timeout 300 python -m benchmarks.throughput "${@:2}" --flags="$1 $flags" \
    --rounds 1 --updates "${UPDATES:-20}" --csv "$out/steps.csv"
}

learn() {  # name, runs side by side, script and flags: trains to 8M steps or until SIGTERM after LIMIT seconds
  local all cores first run
  all=$(nproc) cores=$(((all + $2 - 1) / $2)) first=$((started * cores % all))
  run=$(find "$out/$1" -mindepth 1 -maxdepth 1 -type d 2>/dev/null | head -n 1)
  # shellcheck disable=SC2086
  if [ -n "$run" ]; then set -- "$1" "$2" ${3%% *} --resume "$run"
  else set -- "$1" "$2" $3 --total-timesteps 8000000 --eval-episodes 0 $flags --run-dir "$out/$1"; fi
  timeout "${LIMIT:-480}" taskset -c "$first-$((first + cores - 1))" python "${@:3}" &
  started=$((started + 1))
}

mps() {  # start or stop (docs/gpu.md)
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-$UID CUDA_MPS_LOG_DIRECTORY=/tmp/mps-$UID
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  if [ "$1" = start ]; then mkdir -p "/tmp/mps-$UID" && nvidia-cuda-mps-control -d; started=0
  else wait; echo quit | nvidia-cuda-mps-control; fi
}

(($#)) || set -- trials speed curves games
for part in "$@"; do
  case $part in
    trials) timeout 360 python -m benchmarks.gpu_trials --flags="$flags" | tee "$out/trials.txt" ;;
    speed)
      threads="ppo_procgen --rollout-threads 2" pieces="impala_procgen --update-pieces"
      small="--width 1 --pool flatten --frame-stack 1 --num-envs 512 --num-steps 32 --update-epochs 1"
      speed "" ppo_procgen "$threads"
      speed "--num-envs 256 --num-steps 32" ppo_procgen "$threads"
      speed "$small --num-minibatches 2" ppo_procgen "$threads"
      speed "$small --num-minibatches 8" impala_procgen "$pieces 4" "$pieces 8"
      speed "" "rnd_montezuma --async" "rnd_montezuma --async --num-actors 2"
      ;;
    curves)
      mps start
      learn 64x128 2 "ppo_procgen.py --env-id bigfish"
      learn 256x32 2 "ppo_procgen.py --env-id bigfish --num-envs 256 --num-steps 32"
      mps stop
      python -m experiments.plot "$out"/64x128/* "$out"/256x32/* --out "$out/curves"
      ;;
    games)  # the competition entry's other four
      mps start
      for game in miner chaser plunder starpilot; do learn "$game" 4 "ppo_procgen.py --env-id $game"; done
      mps stop
      ;;
    *) echo "$part: give trials, speed, curves or games" >&2 ;;
  esac
done
