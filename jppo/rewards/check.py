"""Tests a reward on the data's own solutions: python -m jppo.rewards.check --config=configs/gsm8k.py

    python -m jppo.rewards.check --config.data.train_files=train.jsonl --config.reward.function=reward.py

For the first rows of each data source, the run's reward grades the row's right answer and another row's answer. A
source fails if right answers earn no more than wrong ones, because training could not learn from such a reward. Rows
without an answer are scored with an empty response and with the prompt as the response; such a source fails only by
errors, and suspicious scores are a warning. Conversations with tools, an environment or an agent program are held, too,
with a policy that gives the answer in every turn; they fail only by errors. Exit code 1 if one fails. Settings are
given as --config.SECTION.NAME=VALUE; those of models, batches and engines are not read, but the tokenizer of
conversations.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jppo import process, settings
from jppo.data.prompts import SOLUTIONS, PromptSet, make_prompt, prompt_of
from jppo.data.rows import read_sources
from jppo.data.tokenizer import load_tokenizer, tokenize
from jppo.errors import UserError, expanded
from jppo.learner import sharding
from jppo.learner.make import make_mesh
from jppo.rewards.graders import describe_refused
from jppo.rewards.make import make_refusal, make_reward_sum, needed_columns
from jppo.rewards.parts import ConversationPart, RewardSum, Sample, sample_of
from jppo.rollout.protocol import Agent, Answer, RolloutError, Talk, converse, run
from jppo.run.inputs import columns_of, read_ends_and_agent, read_training_prompts
from jppo.runlog.durable_files import missing_folders, remove_unused
from jppo.samples.make import step_sampling
from jppo.settings import Settings
from jppo.types import Prompt, Reward, Sampling, Trajectory

_ROWS, _CONVERSATIONS = 8, 2  # rows per source, of single responses and of conversations
NO_TRUTH = "no row has a ground truth, so a function that reads it gets ''; data.ground_truth_key names its column"
SLOW_S = 1.0  # a report names the time of rewards that took longer
# Characters of most kinds, for functions that count some of them or search for a format.
_PROBE = 'No! Is 3 + 4 = "7"? (Yes.)\n<answer>\\boxed{7}</answer>\n```python\nprint([7])\n```\n{"A": 7}\n#### 7'
# Forms of a ground truth for sources without solutions, as the rules read them; tried in turn.
_FORMS = ("#### {}", "\\boxed{{{}}}", "The answer is {}.", "{}")
Grade = Callable[[Sequence[Prompt], Sequence[str]], list[Reward]]  # texts as responses to the prompts


@dataclasses.dataclass(frozen=True)
class SourceCheck:
    """The result for one source."""

    source: str
    rows: int
    graded: int  # responses
    judged: int  # of these, those whose scores count
    truth: float  # mean score of right answers
    wrong: float  # mean score of other rows' answers
    errors: list[str]
    example: str  # a right answer that was graded
    answers: bool = True  # False: `truth` is of the prompt as the response, `wrong` of an empty response
    talk: bool = False  # an answer was every turn of a conversation, whose reward may be for something else
    no_truth: str = ""  # the warning that no row has a ground truth
    constant: bool = False  # all responses had one score
    cost: str = ""  # the time of a slow reward
    notes: tuple[str, ...] = ()  # on conversations that training would cut

    @property
    def good(self) -> bool:
        """Whether the reward separates right from wrong answers, or without answers scores at all."""
        return not self.errors and (self.truth > self.wrong or not self.answers or self.talk)

    @property
    def warning(self) -> str:
        """Returns a possible mistake in a reward that passes, with its remedy; '' if there is none."""
        if not self.good:
            return ""
        reason = ""
        if not self.answers and self.wrong > self.truth:
            reason = "an empty response earns more: the policy may learn to say nothing"
        elif self.constant:
            reason = f"every response that was tried earns {self.truth:.3g}: check that the reward reads the response"
        elif self.answers and self.truth <= self.wrong:
            reason = "right answers earn no more: check the reward, unless it is for calls or for how an episode ends"
        return "; ".join(filter(None, (reason, self.no_truth if reason or self.answers else "", *self.notes)))

    def __str__(self) -> str:
        template = "right answers earn {:.3g}, others' {:.3g}" + ", each said in every turn" * self.talk
        if not self.answers:
            template = "no answers in the data; the prompt as the response earns {:.3g}, an empty response {:.3g}"
        if len(self.errors) == self.judged:
            template = f"none of {self.judged} responses could be graded"
        return f"{self.source}: {template.format(self.truth, self.wrong)} ({self.rows} rows{self.cost})"


def check_sources(
    c: Settings,
    reward_sum: RewardSum,
    prompts: Sequence[Prompt],
    agent: Agent | None,
    tokenizer: Any,
    ends: Sequence[int],
) -> list[SourceCheck]:
    """Returns findings for each data source: of responses to its first rows, and of conversations with an agent.

    A reward that is only for conversations grades no response.
    """
    reads_responses = not all(isinstance(part, ConversationPart) for part in reward_sum.parts.values())
    checks = _check_responses(reward_sum, prompts) if reads_responses else []
    if agent is None:
        return checks
    try:
        longest = c.data.max_prompt_length
        return checks + _check_conversations(
            reward_sum, prompts, agent.talk, tokenizer, ends[0], step_sampling(c, 0), longest
        )
    except RolloutError as e:
        raise UserError(str(e)) from e
    finally:
        agent.close()


def _check_responses(reward_sum: RewardSum, prompts: Sequence[Prompt]) -> list[SourceCheck]:
    def grade(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Reward]:
        return reward_sum.grade(
            Sample(p, text, len(text.split()), "stop") for p, text in zip(prompts, texts, strict=True)
        )

    return _check_each(grade, prompts, _ROWS)


def _check_conversations(
    reward_sum: RewardSum,
    prompts: Sequence[Prompt],
    talk: Talk,
    tokenizer: Any,
    end: int,
    sampling: Sampling,
    max_prompt_length: int,
) -> list[SourceCheck]:
    """Checks conversations in which the policy gives one text, and the token `end`, in every turn."""

    def grade(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Reward]:
        turns = [[*tokenize(tokenizer, text), end] for text in texts]

        async def say(ids: Sequence[int], *, sampling: Sampling, seed: int, near: Any) -> Answer:
            tokens = turns[near][: sampling.max_tokens]
            finish = "stop" if len(tokens) == len(turns[near]) else "length"
            return Answer(tokens, [0.0] * len(tokens), [0] * len(tokens), finish)

        held = run(converse(say, talk, prompts, dataclasses.replace(sampling, n=1), None))
        trajectories.extend(held)
        return reward_sum.grade(map(sample_of, prompts, held))

    trajectories: list[Trajectory] = []
    checks = _check_each(grade, prompts, _CONVERSATIONS)
    notes = tuple(_describe_cuts(trajectories, max_prompt_length))
    return [dataclasses.replace(check, talk=True, notes=notes) for check in checks]


def _describe_cuts(trajectories: Sequence[Trajectory], max_prompt_length: int) -> Iterator[str]:
    """Yields warnings of episodes that take room from answers, or have branches that training leaves out."""
    longest = max((int(np.argmax(t.sampled)) for t in trajectories if t.sampled.any()), default=0)
    if longest > max_prompt_length:
        yield (
            f"the first request has up to {longest} tokens: raise data.max_prompt_length={max_prompt_length}; the rest"
            " of it takes room from the answers"
        )
    if left_out := max((t.exchange.branches_left_out for t in trajectories if t.exchange is not None), default=0):
        yield f"up to {left_out} branches of an episode are left out of training: see rollout.agent_branches"


def _check_each(grade: Grade, prompts: Sequence[Prompt], rows: int) -> list[SourceCheck]:
    """Checks the first rows of each source."""
    checks = []
    for source in sorted({prompt.data_source for prompt in prompts}):
        start = time.monotonic()
        check = _check(grade, [p for p in prompts if p.data_source == source], rows)
        seconds = time.monotonic() - start
        cost = f", {seconds:.1f} s for {check.graded} responses" if seconds >= SLOW_S else ""
        checks.append(dataclasses.replace(check, cost=cost))
    return checks


def solutions(prompt: Prompt) -> list[str]:
    """Returns right answers: the worked solution first, then the ground truth in the forms that rules read."""
    tables = [prompt.extra, prompt.extra.get("extra_info") or {}]
    worked = [table[name] for table in tables for name in SOLUTIONS if isinstance(table.get(name), str)]
    return worked + [form.format(prompt.ground_truth) for form in _FORMS if prompt.ground_truth]


def _check(grade: Grade, prompts: list[Prompt], rows: int) -> SourceCheck:
    """Checks one source with the form of its answers that scores highest, because the format is up to the rule."""
    answered = [prompt for prompt in prompts if solutions(prompt)]
    if not answered:
        return _check_without_answers(grade, prompts[:rows])
    without, prompts = len(prompts) - len(answered), answered[:rows]
    solutions_of = [solutions(prompt) for prompt in prompts]
    truths = [prompt.ground_truth or texts[0] for prompt, texts in zip(prompts, solutions_of, strict=True)]
    # The first row with another truth; None if all are equal: an empty answer is wrong.
    other_rows = [next((j for j, other in enumerate(truths) if other != truth), None) for truth in truths]
    right_texts = [[texts[min(i, len(texts) - 1)] for texts in solutions_of] for i in range(len(solutions_of[0]))]
    wrong_texts = [["" if j is None else right[j] for j in other_rows] for right in right_texts]
    answers = right_texts + wrong_texts
    # All at once: a part that normalises scores uses the same scale for all.
    all_rewards = iter(grade(prompts * len(answers), [text for texts in answers for text in texts]))
    graded_forms = [[next(all_rewards) for _ in prompts] for _ in answers]
    means = [_mean_score(rewards) for rewards in graded_forms[: len(right_texts)]]
    best_form = max(range(len(means)), key=lambda i: means[i])
    best_answers, wrong_rewards = right_texts[best_form], graded_forms[len(right_texts) + best_form]
    errors = [r.error for r in (*graded_forms[best_form], *wrong_rewards) if r.error is not None]
    return SourceCheck(
        source=prompts[0].data_source,
        rows=len(prompts),
        graded=len(prompts) * len(answers),
        judged=2 * len(prompts),
        truth=means[best_form],
        wrong=_mean_score(wrong_rewards),
        errors=errors,
        example=best_answers[0],
        no_truth=f"{without} other rows have no answer" if without else _no_truth(prompts),
    )


def _check_without_answers(grade: Grade, prompts: list[Prompt]) -> SourceCheck:
    """Scores a source whose rows have no answers: each prompt as its own response, an empty response, and a probe."""
    texts = [p.messages if isinstance(p.messages, str) else p.messages[-1]["content"] for p in prompts]
    rewards = grade([*prompts * 2, prompts[0]], [*texts, *[""] * len(texts), _PROBE])
    echo_score, empty_score = _mean_score(rewards[: len(texts)]), _mean_score(rewards[len(texts) : -1])
    errors = [r.error for r in rewards if r.error is not None]
    return SourceCheck(
        prompts[0].data_source, len(prompts), len(rewards), len(rewards), echo_score, empty_score, errors, texts[0],
        answers=False, no_truth=_no_truth(prompts), constant=len({reward.score for reward in rewards}) == 1,
    )  # fmt: skip


def _no_truth(prompts: Sequence[Prompt]) -> str:
    """Returns the warning that no row has a ground truth, with columns that could be it; '' without such a column."""
    columns = sorted({name for prompt in prompts for name, value in prompt.extra.items() if value not in (None, "")})
    if not columns or any(prompt.ground_truth for prompt in prompts):
        return ""
    return f"{NO_TRUTH}, perhaps {' or '.join(map(repr, columns))}"


def _mean_score(rewards: Sequence[Reward]) -> float:
    scores = [r.score for r in rewards if r.error is None]
    return sum(scores) / len(scores) if scores else float("-inf")


def _report(findings: Sequence[SourceCheck]) -> str:
    """Formats a line per source, and a remedy for failures."""
    lines = []
    for finding in findings:
        text = str(finding).replace(" -inf", " no score")  # where all responses of a kind could not be graded
        lines.append(f"{'FAIL' if not finding.good else 'WARN' if finding.warning else 'OK  '} {text}")
        if finding.warning:
            lines.append(f"     {finding.warning}")
        if finding.errors:
            first_error = finding.errors[0].replace("\n", "\n     | ")
            some = len(finding.errors) < finding.judged
            counted = f"{len(finding.errors)} of {finding.judged} could not be graded; " if some else ""
            lines.append(f"     {counted}the first: {first_error}")
        elif not finding.good:
            lines.append(
                f"     the reward does not separate right from wrong answers; it graded {finding.example[-80:]!r};"
                " check data_source, ground_truth and reward.*, unless your function does not use right answers"
            )
            if finding.no_truth:
                lines.append(f"     {finding.no_truth}")
    return "\n".join(lines)


def _read_prompts(c: Settings, tokenizer: Any) -> PromptSet:
    """Reads the prompts that a run would train on, without tokens."""
    files = read_sources(
        c.data.train_files, "data.train_files", custom_cls=c.data.custom_cls, tokenizer=tokenizer, columns=columns_of(c)
    )
    refuse, needed = make_refusal(c), needed_columns(c)
    prompts = [
        make_prompt(row, prompt_of(row, c.data.prompt_role), [], file.name, needed)
        for file in files
        for row in file.rows
    ]
    reasons = {prompt.uid: refuse(prompt.data_source, prompt.ground_truth) for prompt in prompts}
    refused = tuple(f"{uid}: {why}" for uid, why in reasons.items() if why)
    if len(refused) == len(prompts):
        raise UserError("data.train_files: no row is left; change the asserts, or set reward.code.tests=native")
    return PromptSet([prompt for prompt in prompts if not reasons[prompt.uid]], overlong=0, refused=refused)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Grades answers of the data by the run's reward, and prints a line for each source."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, __doc__, settings.default(), needs_file=False)
    named = bool(config.model.path)
    for section, name in (("model", "path"), ("data", "val_files")):  # not read
        config[section][name] = config[section][name] or "-"
    c = settings.typed(config, Settings, training=False)
    if switches["dry_run"]:
        print(settings.dump(c), end="")
        return
    talks = c.rollout.multi_turn.enable or bool(c.rollout.agent)
    if talks and not named:
        raise UserError("model.path is missing, whose tokenizer and chat template conversations need; set it")
    needs_tokenizer = talks or c.data.custom_cls or c.reward.model.step_aggregation
    tokenizer = load_tokenizer(c.model.path) if needs_tokenizer else None
    ends, agent = read_ends_and_agent(c, tokenizer) if talks else ((), None)
    tools = agent is not None and agent.rewards
    train = read_training_prompts(c, tokenizer, agent) if talks else _read_prompts(c, tokenizer)
    if notice := describe_refused(train.refused):
        print(notice)
    mesh = make_mesh(c)
    process.prepare_process(sharding.platform(mesh), c.trainer.compile_cache, c.model.compute_dtype)
    sources = sorted({prompt.data_source for prompt in train.prompts})
    created = missing_folders(expanded(c.trainer.run_dir))
    with contextlib.ExitStack() as stack:
        stack.callback(remove_unused, created)  # where the graders' log is empty
        reward_sum = make_reward_sum(c, mesh, tokenizer=tokenizer, sources=sources, tool_rewards=tools)
        stack.callback(reward_sum.close)
        reward_sum.ready()
        findings = check_sources(c, reward_sum, train.prompts, agent, tokenizer, ends)
    print(_report(findings))
    if not all(finding.good for finding in findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
