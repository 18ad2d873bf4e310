#!/usr/bin/env bash
# Speed on one GPU (benchmarks/TODO.md): trials, speed and curves, or those that are named; results go to $OUT.
# To try it on a CPU: JAX_PLATFORMS=cpu UPDATES=1 FLAGS="--num-envs 16 --num-steps 4 --num-minibatches 8
# --update-epochs 1 --total-timesteps 256" benchmarks/gpu_session.sh
set -u
cd "$(dirname "$0")/.."
out=${OUT:-runs/gpu_session} flags=${FLAGS:-} half=$(($(nproc) / 2))
mkdir -p "$out"

speed() {  # flags, then variants, which run in turns; ratios are to the first
  timeout 300 python -m benchmarks.throughput "${@:2}" --flags="$1 $flags" \
    --rounds 1 --updates "${UPDATES:-20}" --csv "$out/steps.csv"
}

learn() {  # name, cores, flags
  # shellcheck disable=SC2086
  timeout 480 taskset -c "$2" python ppo_procgen.py --env-id bigfish --total-timesteps 8000000 --eval-episodes 0 \
    $3 $flags --run-dir "$out/$1"
}

(($#)) || set -- trials speed curves
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
    curves)  # side by side under MPS (docs/gpu.md), each on half of the cores
      export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-$UID CUDA_MPS_LOG_DIRECTORY=/tmp/mps-$UID
      export XLA_PYTHON_CLIENT_PREALLOCATE=false
      mkdir -p "/tmp/mps-$UID" && nvidia-cuda-mps-control -d
      learn 64x128 "0-$((half - 1))" "" &
      learn 256x32 "$half-$((2 * half - 1))" "--num-envs 256 --num-steps 32" &
      wait
      echo quit | nvidia-cuda-mps-control
      python -m experiments.plot "$out"/64x128/* "$out"/256x32/* --out "$out/curves"
      ;;
    *) echo "$part: give trials, speed or curves" >&2 ;;
  esac
done
