#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What does a client of `vllm serve` see of a KV policy, over HTTP? See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$here")"
python="${PYTHON:-$root/.venv/bin/python}"

usage() {
  cat <<'TEXT'
usage: bench_serving.sh [options]

What does a client of `vllm serve` see of a KV policy, over HTTP?

In each round every arm gets a server of its own, one after the other (A B A B), with
the same block pool, and `vllm bench serve` sends the same random prompts to each. All
servers are stopped when the script ends, however it ends. A table goes to stderr, the
result as one JSON line to stdout.

  --model DIR              model folder (default: the one `make setup` converts)
  --arm ARM                stock, off or POLICY:BUDGET[:SETTING=VALUE,...]; repeat for
                           more; the first is what the others are compared with
                           (default: off and keyformer:0.5)
  --rounds N               servers of each arm (default: 2)
  --requests N             requests per round (default: 24)
  --prompt-len TOKENS      (default: 2048)
  --new-tokens TOKENS      (default: 512)
  --pool N                 full sequences that the pool holds, at least 2 (default: 4)
  --request-rate RATE      requests per second; inf: all at once (default: inf)
  --max-concurrency N      requests in flight (default: all)
  --dtype DTYPE            of model and cache (default: bfloat16)
  --block-size TOKENS      (default: 32)
  --max-batched-tokens N   tokens per step (default: 2048)
  --serve-args 'ARGS'      further arguments of vllm serve, for all arms
  --timeout SECONDS        for a server to start (default: 600)
  --logs DIR               keep the logs and the results of each round here
  --output FILE            also write the JSON result here
  --plot FILE              draw the result as this PNG file
  --help                   show this text

PYTHON names another interpreter than that of .venv.
TEXT
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

say() { printf '%s\n' "$*" >&2; }

model=
arms=()
rounds=2
requests=24
prompt_len=2048
new_tokens=512
pool=4
request_rate=inf
max_concurrency=
dtype=bfloat16
block_size=32
max_batched_tokens=2048
serve_args=()
timeout=600
logs=
report_options=()

while (($# > 0)); do
  option="$1"
  if [[ "$option" == --help ]]; then
    usage
    exit 0
  fi
  (($# > 1)) || fail "$option: unknown, or its value is missing; see --help"
  value="$2"
  case "$option" in
  --rounds | --requests | --prompt-len | --new-tokens | --pool | --max-concurrency | \
    --block-size | --max-batched-tokens | --timeout)
    [[ "$value" =~ ^[1-9][0-9]*$ ]] || fail "$option $value is not a number above 0"
    ;;
  esac
  case "$option" in
  --model) model="$value" ;;
  --arm) arms+=("$value") ;;
  --rounds) rounds="$value" ;;
  --requests) requests="$value" ;;
  --prompt-len) prompt_len="$value" ;;
  --new-tokens) new_tokens="$value" ;;
  --pool) pool="$value" ;;
  --request-rate) request_rate="$value" ;;
  --max-concurrency) max_concurrency="$value" ;;
  --dtype) dtype="$value" ;;
  --block-size) block_size="$value" ;;
  --max-batched-tokens) max_batched_tokens="$value" ;;
  --serve-args) read -r -a serve_args <<<"$value" ;;
  --timeout) timeout="$value" ;;
  --logs) logs="$value" ;;
  --output | --plot) report_options+=("$option" "$value") ;;
  *) fail "$option: unknown; see --help" ;;
  esac
  shift 2
done

((${#arms[@]} > 0)) || arms=(off keyformer:0.5)
((pool > 1)) || fail "--pool $pool is not at least 2"
command -v "$python" >/dev/null || fail "$python is missing; run make setup, or set PYTHON"
helper() { "$python" "$here/serving.py" "$@"; }

# The checkout comes before an installed package; loopback needs no proxy; the model
# is a folder.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# What is wrong shall be found before the first server is up.
helper check "${report_options[@]}" -- "${arms[@]}"
[[ -n "$model" ]] || model="$(helper model)"
[[ -f "$model/config.json" ]] || fail "$model holds no model"

groups=()

# Each server and client leads a process group, so that nothing of it is left behind.
stop_groups() {
  local group deadline
  for group in "${groups[@]}"; do
    # There is no group yet where setsid has not got that far.
    kill -TERM -- "-$group" 2>/dev/null || kill -TERM "$group" 2>/dev/null || true
  done
  for group in "${groups[@]}"; do
    deadline=$((SECONDS + 30))
    while kill -0 "$group" 2>/dev/null && ((SECONDS < deadline)); do
      sleep 0.2
    done
    kill -KILL -- "-$group" 2>/dev/null || true
    wait "$group" 2>/dev/null || true
  done
  groups=()
}

folder=
clean_up() {
  trap '' INT TERM HUP # a second Ctrl-C must not leave half of them
  stop_groups
  if [[ -n "$folder" && -z "$logs" ]]; then
    rm -rf "$folder"
  fi
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -n "$logs" ]]; then
  mkdir -p "$logs"
  folder="$logs"
else
  folder="$(mktemp -d)"
fi

blocks_per_request=$(((prompt_len + new_tokens + block_size - 1) / block_size))
num_blocks=$((pool * blocks_per_request + 1)) # one is vLLM's null block

# Starts a command as the leader of a new process group; its id is in `leader`.
start() {
  setsid "$@" &
  leader=$!
  groups+=("$leader")
}

# Runs a command to its end. In the background, because a trap runs at once during
# `wait`, but not during a command.
run() {
  start "$@"
  wait "$leader"
  unset 'groups[-1]'
}

run_arm() { # ROUND INDEX ARM
  local round="$1" index="$2" arm="$3" name="$1-$2" url port flags server_flags=()
  port="$(helper port)"
  url="http://127.0.0.1:$port"
  flags="$(helper flags "$arm")"
  [[ -z "$flags" ]] || mapfile -t server_flags <<<"$flags"
  local environment=()
  [[ "$arm" != stock ]] || environment=(VLLM_PLUGINS=)

  say "round $round of $rounds: $arm"
  start env "${environment[@]}" "$python" -m vllm.entrypoints.cli.main serve "$model" \
    --host 127.0.0.1 --port "$port" --served-model-name bench --dtype "$dtype" \
    --block-size "$block_size" --num-gpu-blocks-override "$num_blocks" \
    --max-model-len "$((prompt_len + new_tokens + block_size))" \
    --max-num-seqs "$requests" --max-num-batched-tokens "$max_batched_tokens" \
    --no-enable-prefix-caching --enforce-eager \
    "${server_flags[@]}" "${serve_args[@]}" \
    </dev/null >"$folder/server-$name.log" 2>&1
  local server="$leader"

  run "$python" "$here/serving.py" wait "$url" "$server" "$timeout" \
    "$folder/server-$name.log"

  local client=("$python" -m vllm.entrypoints.cli.main bench serve
    --backend openai --base-url "$url" --model bench --tokenizer "$model"
    --dataset-name random --random-input-len "$prompt_len"
    --random-output-len "$new_tokens" --num-prompts "$requests" --num-warmups 1
    --ignore-eos --temperature 0 --seed "$round" --request-rate "$request_rate"
    --percentile-metrics "ttft,itl" --metric-percentiles 90 --disable-tqdm
    --save-result --result-dir "$folder" --result-filename "client-$name.json")
  [[ -z "$max_concurrency" ]] || client+=(--max-concurrency "$max_concurrency")
  run "$python" "$here/serving.py" drive "$url" "$arm" "$folder" "$name" -- \
    "${client[@]}"
  stop_groups
}

for ((round = 1; round <= rounds; round++)); do
  for index in "${!arms[@]}"; do
    run_arm "$round" "$index" "${arms[$index]}"
  done
done

settings=(model="$model" rounds="$rounds" requests="$requests" prompt_len="$prompt_len"
  new_tokens="$new_tokens" pool="$pool" num_blocks="$num_blocks"
  request_rate="\"$request_rate\"" max_concurrency="${max_concurrency:-null}"
  dtype="$dtype" block_size="$block_size" max_batched_tokens="$max_batched_tokens"
  serve_args="${serve_args[*]}")
helper report "$folder" "$rounds" "${report_options[@]}" --settings "${settings[@]}" \
  -- "${arms[@]}"
