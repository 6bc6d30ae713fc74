#!/usr/bin/env bash
# Trains on your own model and data: prints the python -m jppo.train that the options stand for, and runs it.
#
#   scripts/train.sh --model DIR --data train.jsonl --val_data test.jsonl --epochs 2
#   scripts/train.sh --model DIR --data train.jsonl --reward_function reward.py --algorithm grpo --n 8
#   scripts/train.sh --model DIR --data train.jsonl actor_rollout_ref.model.lora_rank=8
#   scripts/train.sh --help
set -euo pipefail

# An option, the environment variable that stands in for it, what its value is, its setting, what it means.
readonly TABLE='--model|MODEL_PATH|model|model.path|policy to start from: a model directory, or a hub name
--data|-|data|data.train_files|training prompts: .json, .jsonl, .parquet or hub:NAME/SPLIT; several separated by commas
--val_data|-|data|data.val_files|test prompts; by default the first 256 prompts of --data
--reward_function|-|function|reward.function|FILE.py or FILE.py:NAME that scores responses in place of the rules; NAME is compute_score by default
--algorithm|-|algorithm|algorithm.adv_estimator|ppo (the default), grpo, rloo, remax, reinforce_plus_plus ...; grpo and rloo need --n above 1
--n|ROLLOUT_N|whole|rollout.n|responses per prompt
--max_response_length|-|whole|data.max_response_length|longest response, in tokens
--epochs|-|whole|trainer.total_epochs|passes over the data
--steps|-|whole|trainer.total_training_steps|training steps, in place of --epochs
--batch_size|-|whole|data.train_batch_size|prompts per step; times --n a multiple of actor.ppo_mini_batch_size
--run_dir|-|text|trainer.run_dir|folder of everything that the run writes
--lr|-|number|actor.lr|learning rate of the policy
-|PPO_EPOCHS|whole|actor.ppo_epochs|PPO epochs per step
-|CLIP_RATIO|number|actor.clip_ratio|PPO clip range
-|CRITIC_LR|number|critic.lr|learning rate of the critic
-|CRITIC_EPOCHS|whole|critic.ppo_epochs|epochs of the critic per step
-|CLIPRANGE_VALUE|number|critic.cliprange_value|clip range of the value loss
-|GAE_GAMMA|number|algorithm.gamma|discount factor
-|GAE_LAMBDA|number|algorithm.lam|lambda of GAE
--kl_coef|KL_COEF|number|algorithm.kl_coef|KL penalty weight; setting it enables the penalty
-|ROLLOUT_TEMPERATURE|number|rollout.temperature|sampling temperature
-|ROLLOUT_TP_SIZE|whole|rollout.tensor_model_parallel_size|GPUs per server
-|GPU_MEMORY_UTILIZATION|number|rollout.gpu_memory_utilization|fraction of a GPU for vLLM
--reward_model|REWARD_MODEL_PATH|model|reward.model.path|classifier that scores responses in place of the rules
--use_api_reward|-|switch|-|judge over HTTP that scores responses in place of the rules
--rm_api_type|-|text|reward.judge.api_type|provider of the judge: dashscope (the default), openai, gemini or claude
--rm_model|-|text|reward.judge.model|model name of the judge; by default qwen-plus, gpt-4o, gemini-2.5-flash or claude-sonnet-4-5
--rm_prompt_preset|-|text|reward.judge.preset|prompts of the judge: math (the default), code, dialogue or safety
--rm_system_prompt|-|text|reward.judge.system_prompt|system prompt, in place of the preset'"'"'s
--rm_scoring_prompt|-|text|reward.judge.scoring_prompt|question with {prompt}, {response}, {ground_truth}
--n_gpus|N_GPUS|whole|mesh.data|GPUs of this host to use; --config.mesh.NAME overrides their mesh
-|NNODES|whole|trainer.nnodes|hosts; the same command runs on each
-|NODE_RANK|whole|trainer.node_rank|rank of this host, from 0
-|MASTER_ADDR|text|trainer.coordinator_address|address of host 0 if NNODES is above 1; its port is MASTER_PORT, or 29500
--print_only|-|switch|-|print the command and stop'
readonly RECIPE=jppo://gsm8k

fail() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    cat <<TEXT
usage: scripts/train.sh [OPTION VALUE ...] [--config=FILE] [--config.SECTION.NAME=VALUE ...] [VERL.KEY=VALUE ...]

Prints the python -m jppo.train that the options stand for, and runs it. An option overrides its environment
variable; an empty variable counts as unset. All other settings are those of --config, by default
$RECIPE. --config.SECTION.NAME=VALUE and --dry_run are passed on. Without --config, the run folder of --data
is runs/NAME. PYTHON is the interpreter: that of .venv here if there is one, else python.
Overrides in verl's names, such as actor_rollout_ref.model.lora_rank=8, are translated by python -m jppo.from_verl.

TEXT
    local option variable kind setting meaning
    while IFS='|' read -r option variable kind setting meaning; do
        case $option$variable in
            *--) ;;                       # neither
            -[A-Z]*) option=$variable ;;  # a variable alone
            *-) ;;                        # an option alone
            *) option="$option, $variable" ;;
        esac
        [[ $setting == - ]] || meaning+=" ($setting)"
        printf '  %s\n      %s\n' "$option" "$meaning"
    done <<<"$TABLE"
    printf '  %s\n      %s\n' --help "print this and stop"
}

# Whether a value is of its kind; $1 says where it stands.
check() {
    local said=$1 kind=$2 value=$3
    case $kind in
        whole)
            [[ $value =~ ^[0-9]+$ ]] || fail "$said=$value is no whole number; give one such as 2"
            ;;
        number)
            [[ $value =~ ^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$ ]] ||
                fail "$said=$value is no number; give one such as 0.5 or 1e-6"
            ;;
        model) # a hub's name has one slash at most
            local path=${value/#\~\//$HOME/}
            if [[ -e $path || ! $value =~ ^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?$ ]]; then
                [[ -d $path ]] || fail "$said=$value: no such folder; give a model directory, or a hub name"
                [[ -f $path/config.json ]] || fail "$said=$value has no config.json; give a Hugging Face model directory"
            fi
            ;;
        function)
            [[ ${value%%:*} == *.py ]] || fail "$said=$value must be FILE.py or FILE.py:NAME, as in reward.py:compute_score"
            [[ -f ${value%%:*} ]] || fail "$said=$value: no file ${value%%:*}; give the path of a Python file"
            ;;
        data)
            if [[ -n ${direct[data.custom_cls]+set} || -n $own_config ]]; then return; fi # entries need not be files
            local entry entries found=
            IFS=, read -r -a entries <<<"$value"
            for entry in "${entries[@]}"; do
                read -r entry <<<"$entry"
                if [[ -z $entry ]]; then continue; fi
                found=1
                if [[ $entry != tfds:* && $entry != hub:* && ! -f ${entry/#\~\//$HOME/} ]]; then
                    fail "$said=$value: no file $entry; give .json, .jsonl or .parquet files, separated by commas"
                fi
            done
            [[ -n $found ]] || fail "$said=$value names no file; give .json, .jsonl or .parquet files"
            ;;
    esac
}

declare -A kind_of=()
while IFS='|' read -r option _ kind _; do
    if [[ $option != - ]]; then kind_of[$option]=$kind; fi
done <<<"$TABLE"

declare -A given=() direct=() # by option; by setting, where --config.SETTING names it
handed=() # --config.SETTING=VALUE
dry_run=()
overrides=() # in verl's names
own_config=
while (($#)); do
    word=$1
    name=${word%%=*}
    shift
    case $word in
        -h | --help)
            usage
            exit 0
            ;;
        --dry_run)
            dry_run=("$word")
            continue
            ;;
        --config=?*)
            [[ -z $own_config ]] || fail "--config is given twice; leave one of them out"
            own_config=${word#*=}
            if [[ $own_config != jppo://* && ! -f ${own_config%%:*} ]]; then
                fail "$word: no such file; give a file with get_config(), or $RECIPE"
            fi
            continue
            ;;
        --config.?*=*)
            [[ -z ${direct[${name#--config.}]+set} ]] || fail "$name is given twice; leave one of them out"
            direct[${name#--config.}]=${word#*=}
            handed+=("$word")
            continue
            ;;
        [a-z+]*.*=*)
            overrides+=("$word")
            continue
            ;;
        --config*) fail "$word is not understood; write --config=FILE, or --config.SECTION.NAME=VALUE" ;;
    esac
    [[ $name == --?* && -n ${kind_of[$name]+set} ]] || fail "$word is not understood; scripts/train.sh --help lists the options"
    [[ -z ${given[$name]+set} ]] || fail "$name is given twice; leave one of them out"
    if [[ ${kind_of[$name]} == switch ]]; then
        [[ $word == "$name" ]] || fail "$word: $name takes no value; leave it out to switch it off"
        given[$name]=1
        continue
    fi
    if [[ $word == *=* ]]; then
        given[$name]=${word#*=}
    elif (($#)) && [[ $1 != --* ]]; then
        given[$name]=$1
        shift
    fi
    [[ -n ${given[$name]-} ]] || fail "$name needs a value; scripts/train.sh --help says which"
done

# By setting: the option's value, else the environment's where --config.SETTING does not name it.
declare -A chosen=() said_by=()
while IFS='|' read -r option variable kind setting _; do
    if [[ $setting == - ]]; then continue; fi
    if [[ -n ${given[$option]+set} ]]; then
        [[ -z ${direct[$setting]+set} ]] || fail "$option and --config.$setting say the same twice; leave one of them out"
        chosen[$setting]=${given[$option]} said_by[$setting]=$option
    elif [[ $variable != - && -n ${!variable-} && -z ${direct[$setting]+set} ]]; then
        chosen[$setting]=${!variable} said_by[$setting]=$variable
    fi
    if [[ -n ${chosen[$setting]+set} ]]; then check "${said_by[$setting]}" "$kind" "${chosen[$setting]}"; fi
done <<<"$TABLE"

python=${PYTHON-}
if [[ -z $python ]]; then
    python=$(dirname "$(dirname "$(realpath "$0")")")/.venv/bin/python
    if [[ ! -x $python ]]; then python=python; fi
fi

if [[ ${chosen[algorithm.adv_estimator]-} == ppo ]]; then chosen[algorithm.adv_estimator]=gae; fi

# Overrides in verl's names become --config.SETTING=VALUE; the environment gives way to them.
if ((${#overrides[@]})); then
    command -v "$python" >/dev/null || fail "PYTHON=$python cannot be run; name an interpreter that has jppo"
    settings=("--config=${own_config:-$RECIPE}" "${handed[@]}")
    for setting in "${!chosen[@]}"; do settings+=("--config.$setting=${chosen[$setting]}"); done
    translated=$("$python" -m jppo.from_verl "${settings[@]}" "${overrides[@]}") || [[ $? == 3 ]] || exit 2
    while IFS= read -r word; do
        if [[ $word != --config.* ]]; then
            if [[ -n $word ]]; then echo "$word" >&2; fi
            continue
        fi
        setting=${word%%=*} setting=${setting#--config.}
        [[ -z ${direct[$setting]+set} ]] || fail "an override of verl's gives $setting as --config.$setting does; leave one of them out"
        [[ ${said_by[$setting]-} != --* ]] || fail "an override of verl's gives $setting as ${said_by[$setting]} does; leave one of them out"
        unset 'chosen[$setting]'
        direct[$setting]=${word#*=}
        handed+=("$word")
    done <<<"$translated"
fi

# What a setting will be, as far as it is said here.
said() { echo "${chosen[$1]-${direct[$1]-}}"; }

# What options ask for beside their own settings; in a fixed order.
more=()
also() { # unless it is named already
    if [[ -z ${direct[$1]+set} && -z ${chosen[$1]+set} ]]; then more+=("--config.$1=$2"); fi
}

# The judge's settings that no option gives.
judge_defaults() {
    also reward.judge.api_type dashscope
    if [[ -z $(said reward.judge.model) ]]; then
        [[ -z $(said reward.judge.base_url) ]] ||
            fail "--use_api_reward with --config.reward.judge.base_url needs --rm_model: the name that this server gives its model"
        local provider
        provider=$(said reward.judge.api_type)
        case ${provider:-dashscope} in
            dashscope) also reward.judge.model qwen-plus ;;
            openai) also reward.judge.model gpt-4o ;;
            gemini) also reward.judge.model gemini-2.5-flash ;;
            claude) also reward.judge.model claude-sonnet-4-5 ;;
            *) fail "--rm_api_type $provider is not known; give dashscope, openai, gemini or claude" ;;
        esac
    fi
    if [[ -z $(said reward.judge.scoring_prompt) ]]; then also reward.judge.preset math; fi
}

# Whether --config describes a judge.
names_a_judge() {
    local file=${own_config%%:*}
    [[ $own_config != jppo://* ]] || file=$(dirname "$(dirname "$(realpath "$0")")")/jppo/configs/${own_config#jppo://}.py
    [[ -n $own_config ]] && grep -qs 'judge\.api_type' "$file"
}

if [[ -n ${given[--data]+set} && -z $own_config ]]; then
    first=${given[--data]%%,*}
    first=${first##*/}
    also trainer.run_dir "runs/${first%.*}"
    if [[ -z $(said data.val_files) ]]; then
        also data.val_files "${given[--data]}"
        also data.val_max_samples 256
        echo "no --val_data: tests ask the first 256 prompts of --data" >&2
    fi
fi

if [[ -n ${chosen[algorithm.kl_coef]+set} ]]; then
    if [[ ${direct[algorithm.use_kl_in_reward]-True} =~ ^([Ff]alse|0)$ ]]; then
        fail "${said_by[algorithm.kl_coef]}=${chosen[algorithm.kl_coef]} is of the KL in the reward, and" \
            "--config.algorithm.use_kl_in_reward=${direct[algorithm.use_kl_in_reward]}; leave one of them out"
    fi
    also algorithm.use_kl_in_reward True
fi

weights=()
if [[ -n ${chosen[reward.model.path]+set} ]]; then weights+=(rm_score=1); fi
if [[ -n ${given[--use_api_reward]+set} ]]; then
    weights+=(judge_score=1)
    if ! names_a_judge; then judge_defaults; fi
else
    for option in "${!given[@]}"; do
        [[ $option != --rm_* ]] || fail "$option is for a judge, which nobody asks; give --use_api_reward too"
    done
fi
if ((${#weights[@]})); then also reward.weights "$(IFS=, && echo "${weights[*]}")"; fi

# Of several hosts each knows the first; one alone knows none.
hosts=$(said trainer.nnodes)
[[ $hosts =~ ^[0-9]+$ ]] || hosts=1
if ((10#$hosts == 1)); then
    unset 'chosen[trainer.coordinator_address]'
elif [[ -n ${chosen[trainer.coordinator_address]+set} ]]; then
    chosen[trainer.coordinator_address]+=:${MASTER_PORT:-29500}
fi

environment=()
gpus=${chosen[mesh.data]-}
if [[ -n $gpus ]]; then
    ((10#$gpus >= 1)) || fail "${said_by[mesh.data]}=$gpus must be 1 or more; JAX_PLATFORMS=cpu trains without a GPU"
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -r -a there <<<"$CUDA_VISIBLE_DEVICES"
        ((${#there[@]} >= 10#$gpus)) ||
            fail "${said_by[mesh.data]}=$gpus, and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names ${#there[@]}; mend one"
    else
        mapfile -t there < <(seq 0 $((10#$gpus - 1)))
    fi
    environment=("CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${there[*]:0:10#$gpus}")")
    chosen[mesh.data]=$((10#$gpus * 10#$hosts))
    for setting in "${!direct[@]}"; do
        if [[ $setting == mesh.* ]]; then unset 'chosen[mesh.data]'; fi
    done
fi

command=("$python" -m jppo.train "--config=${own_config:-$RECIPE}")
while IFS='|' read -r _ _ _ setting _; do
    if [[ $setting != - && -n ${chosen[$setting]+set} ]]; then command+=("--config.$setting=${chosen[$setting]}"); fi
done <<<"$TABLE"
command+=("${more[@]}" "${handed[@]}" "${dry_run[@]}")

printf -v line '%q ' "${environment[@]}" "${command[@]}"
echo "${line% }"
if [[ -n ${given[--print_only]+set} ]]; then exit 0; fi
command -v "$python" >/dev/null || fail "PYTHON=$python cannot be run; name an interpreter that has jppo"
exec env "${environment[@]}" "${command[@]}"
