#!/usr/bin/env bash
# Runs the named parts of benchmarks/TODO.md on one GPU: trials, speed, curves, games. Ends LIMIT seconds (570) after
# the start. Results go to $OUT, at most eight files: trials.txt, steps.csv and an archive of each training run. Needs
# the packages of requirements.txt except wandb.
# FROM=DIR continues the training runs whose archives an earlier session left in DIR.
# To try it on a CPU: JAX_PLATFORMS=cpu OUT=/tmp/gpu UPDATES=1 FLAGS="--num-envs 16 --num-steps 4 --num-minibatches 8
# --update-epochs 1 --total-timesteps 256" benchmarks/gpu_session.sh trials speed curves games
set -u
cd "$(dirname "$0")/.." || exit
out=${OUT:-runs/gpu_session} flags=${FLAGS:-} end=$((SECONDS + ${LIMIT:-570})) started=0
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda} # fail without a GPU, rather than run on the CPU
(($#)) || set -- help
for part in "$@"; do
  case $part in trials | speed | curves | games) ;; *) echo "$part: give trials, speed, curves or games" >&2; exit 2 ;; esac
done
[ -z "${FROM:-}" ] || [ -d "$FROM" ] || { echo "FROM=$FROM: is no folder" >&2; exit 2; }
mkdir -p "$out" runs && work=$(mktemp -d runs/gpu_session.XXXXXX) || exit
for archive in ${FROM:+"$FROM"/*.tar.gz}; do tar xzf "$archive" -C "$work" || exit; done
python -c "import jax, pydantic, ppo_procgen, impala_procgen, rnd_montezuma, benchmarks.throughput, benchmarks.gpu_trials
print(jax.devices())" || exit
mapfile -t allowed < <(python -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")') # this process's cores
trap 'jobs -pr | xargs -r kill; wait' EXIT
trap 'exit 130' INT TERM

left() { echo $((end - SECONDS)); }

speed() {  # flags, then variants: once each, in this order; ratios are to the first
  if (($(left) < 60)); then echo "no time left for: $*"; return; fi
  timeout "$(left)" python -m benchmarks.throughput "${@:2}" --flags="$1 $flags" \
    --rounds 1 --updates "${UPDATES:-20}" --csv "$out/steps.csv"
}

train() {  # name, number of runs side by side, script with flags: trains to 8M steps; SIGTERM 45 s before the end
  if (($(left) < 120)); then echo "no time left for: $1"; return; fi
  local share cores checkpoint
  share=$(((${#allowed[@]} + $2 - 1) / $2))
  cores=$(IFS=,; echo "${allowed[*]:started * share % ${#allowed[@]}:share}")
  # Any checkpoint: only the run directory that holds it is needed.
  checkpoint=$(find "$work/$1" -mindepth 3 -maxdepth 3 -path '*/checkpoints/[0-9]*' ! -name '*.*' -print -quit \
    2> /dev/null)
  # shellcheck disable=SC2086
  if [ -n "$checkpoint" ]; then set -- "$1" "$2" ${3%% *} --resume "${checkpoint%/checkpoints/*}"
  else set -- "$1" "$2" $3 --total-timesteps 8000000 --eval-episodes 0 --keep-checkpoints 1 --wandb-mode disabled $flags \
    --run-dir "$work/$1"; fi
  timeout "$(($(left) - 45))" taskset -c "$cores" python "${@:3}" &
  started=$((started + 1))
}

mps() {  # starts the daemon (docs/gpu.md)
  unset CUDA_VISIBLE_DEVICES
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps-$UID CUDA_MPS_LOG_DIRECTORY=/tmp/mps-$UID XLA_PYTHON_CLIENT_PREALLOCATE=false
  mkdir -p "/tmp/mps-$UID" && nvidia-cuda-mps-control -d
  started=0
}

finish() {  # waits for the runs, ends the daemon, archives what is named
  if ((started)); then sleep 60; echo "processes of MPS: $(echo get_server_list | nvidia-cuda-mps-control)"; fi
  wait
  echo quit | nvidia-cuda-mps-control
  for name in "$@"; do [ ! -d "$work/$name" ] || tar czf "$out/$name.tar.gz" -C "$work" "$name"; done
}

for part in "$@"; do
  case $part in
    trials)
      if (($(left) < 60)); then echo "no time left for: trials"; continue; fi
      timeout "$(left)" python -m benchmarks.gpu_trials --flags="$flags" 2>&1 | tee "$out/trials.txt"
      ;;
    speed)
      threads="ppo_procgen --rollout-threads 2" pieces="impala_procgen --update-pieces"
      small="--width 1 --pool flatten --frame-stack 1 --num-envs 512 --num-steps 32 --update-epochs 1"
      speed "" ppo_procgen "$threads"
      speed "$small --num-minibatches 8" impala_procgen "$pieces 4" "$pieces 8"
      speed "--num-envs 256 --num-steps 32" ppo_procgen "$threads"
      speed "$small --num-minibatches 2" ppo_procgen "$threads"
      speed "" "rnd_montezuma --async" "rnd_montezuma --async --num-actors 2"
      ;;
    curves)
      mps
      train 64x128 2 "ppo_procgen.py --env-id bigfish"
      train 256x32 2 "ppo_procgen.py --env-id bigfish --num-envs 256 --num-steps 32"
      finish 64x128 256x32
      ;;
    games)  # the competition entry's other four
      mps
      for game in miner chaser plunder starpilot; do train "$game" 4 "ppo_procgen.py --env-id $game"; done
      finish miner chaser plunder starpilot
      ;;
  esac
done
