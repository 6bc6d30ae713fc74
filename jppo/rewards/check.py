"""Tests a reward on the data's own solutions: python -m jppo.rewards.check --config=configs/gsm8k.py

    python -m jppo.rewards.check --config.data.train_files=train.jsonl --config.reward.function=reward.py

For the first rows of each data source, the run's reward grades the row's right answer in several forms, another row's
right answer, and texts without an answer. A source fails if right answers earn no more than wrong ones, because
training could not learn from such a reward, or if a text cannot be graded. A reward that does not read the ground truth
is a warning. Rows without an answer are scored with an empty response and with the prompt as the response; such a
source fails only by errors, and suspicious scores are a warning. Conversations with tools, an environment or an agent
program are held, too, with a policy that gives the answer in every turn; they fail only by errors. Exit code 1 if one
fails. Settings are given as --config.SECTION.NAME=VALUE; those of models, batches and engines are not read, but the
tokenizer of conversations.
"""

import collections
import contextlib
import dataclasses
import json
import math
import sys
import textwrap
import threading
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
from jppo.rewards.earned import finite
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
_WORDS = " ".join(["The train left at noon, and nobody on the platform knew where it would stop."] * 8)
# Forms of a ground truth for sources without solutions, as the rules read them; tried in turn.
_FORMS = ("#### {}", "\\boxed{{{}}}", "The answer is {}.", "{}")
_FURTHER_FORMS = (
    "<think>So.</think><answer>{}</answer>",
    "<think>\nSo.\n</think>\n<answer>\n{}\n</answer>",
    "Answer: {}",
    "Final Answer: {}",
    '{{"answer": "{}"}}',
    "({})",
)
_PROGRAMS = ("code", "canonical_solution")  # columns of programs
TRY_ANSWERS = "a column 'answer' with right responses, as the model should write them, is graded"
LATE = "took longer than"  # of errors
WAIT_S = 10.0  # seconds before a check says that it is waiting
Grade = Callable[[Sequence[Prompt], Sequence[str]], list[Reward]]  # texts as responses to the prompts


@dataclasses.dataclass(frozen=True)
class SourceCheck:
    """The result for one source."""

    source: str
    rows: int
    graded: int  # responses
    truth: float  # mean score of right answers
    wrong: float  # mean score of other rows' answers
    errors: list[tuple[str, str]]  # of responses: the response, and why it could not be graded
    example: str  # a right answer that was graded
    specified: bool = False  # the ground truth is a list or an object, perhaps what an answer must fulfil
    reads_truth: bool = True  # False: a response earns the same beside another ground truth
    answers: bool = True  # False: `truth` is of the prompt as the response, `wrong` of an empty response
    talk: bool = False  # an answer was every turn of a conversation, whose reward may be for something else
    no_truth: str = ""  # the remark that no row has a ground truth
    constant: bool = False  # all responses had one score
    cost: str = ""  # the time of a slow reward
    notes: tuple[str, ...] = ()  # warnings of another kind

    @property
    def good(self) -> bool:
        """Whether the reward separates right from wrong answers, or is none of which that could be asked."""
        excused = not self.answers or self.talk or self.specified or not self.reads_truth
        return not self.errors and (self.truth > self.wrong or excused)

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
            reason = "right answers earn no more: "
            if self.talk:
                reason += "check the reward, unless it is for calls or for how an episode ends"
            elif self.specified:
                reason += f"the ground truth is a list or an object; {TRY_ANSWERS}"
            else:
                reason += "each response earned the same beside another ground truth, as if the reward did not read it"
        return "; ".join(filter(None, (reason, self.no_truth if reason else "", *self.notes)))

    def __str__(self) -> str:
        template = "right answers earn {:.3g}, others' {:.3g}" + ", each said in every turn" * self.talk
        if not self.answers:
            template = "no answers in the data; the prompt as the response earns {:.3g}, an empty response {:.3g}"
        if len(self.errors) == self.graded:
            template = f"none of {self.graded} responses could be graded"
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
    return [dataclasses.replace(check, talk=True, notes=check.notes + notes) for check in checks]


def _describe_cuts(trajectories: Sequence[Trajectory], max_prompt_length: int) -> Iterator[str]:
    """Yields warnings of episodes that take room from answers, or have branches that training leaves out."""
    longest = max((int(np.argmax(t.sampled)) for t in trajectories if t.sampled.any()), default=0)
    if longest > max_prompt_length:
        yield (
            f"the first request has up to {longest} tokens: raise data.max_prompt_length={max_prompt_length}; the rest"
            " of it takes room from the answers"
        )
    refusals = [t.exchange.refusal for t in trajectories if t.exchange is not None and t.exchange.refusal]
    if refusals:
        yield f"{len(refusals)} of {len(trajectories)} episodes had a request refused, the first: {refusals[0]}"
    if left_out := max((t.exchange.branches_left_out for t in trajectories if t.exchange is not None), default=0):
        yield f"up to {left_out} branches of an episode are left out of training: see rollout.agent_branches"


def _check_each(grade: Grade, prompts: Sequence[Prompt], rows: int) -> list[SourceCheck]:
    """Checks the first rows of each source."""
    checks = []
    for source in sorted({prompt.data_source for prompt in prompts}):
        start = time.monotonic()
        waiting = threading.Timer(WAIT_S, print, [f"{source}: waiting for the reward or the agent"], {"flush": True})
        waiting.daemon = True
        waiting.start()
        try:
            check = _check(grade, [p for p in prompts if p.data_source == source], rows)
        finally:
            waiting.cancel()
        seconds = time.monotonic() - start
        cost = f", {seconds:.1f} s for {check.graded} responses" if seconds >= SLOW_S else ""
        checks.append(dataclasses.replace(check, cost=cost))
    return checks


def solutions(prompt: Prompt, forms: Sequence[str] = _FORMS) -> list[str]:
    """Returns right answers: the worked solution first, then the ground truth in the forms that rules read."""
    tables = [prompt.extra, prompt.extra.get("extra_info") or {}]
    worked = [_as_text(table.get(name)) for table in tables for name in SOLUTIONS]
    truth, _ = _plain_truth(prompt.ground_truth)
    programs = [table[name] for table in tables for name in _PROGRAMS if truth and isinstance(table.get(name), str)]
    worked += [f"```python\n{program}\n```" for program in programs]
    return [text for text in worked if text is not None] + [form.format(truth) for form in forms if truth]


def _as_text(value: Any) -> str | None:
    """Returns a text, or a finite number as text; None for anything else."""
    return value if isinstance(value, str) else None if finite(value) is None else str(value)


def _plain_truth(ground_truth: str) -> tuple[str, bool]:
    """Returns the answer that a ground truth says, and whether it is JSON of a list or an object.

    The first of a list may be the answer, or an object's 'target'.
    """
    try:
        value = json.loads(ground_truth)
    except ValueError:
        return ground_truth, False
    if not isinstance(value, dict | list):
        return ground_truth, False
    target = value.get("target") if isinstance(value, dict) else value
    target = target[0] if isinstance(target, list) and target else target
    return _as_text(target) or ground_truth, True


def _contrast(truths: Sequence[str], most: int) -> tuple[list[int], list[int | None]]:
    """Chooses up to `most` rows, and for each of them the chosen row whose right answer is wrong for it.

    Each chosen row is another's wrong one, so that right and wrong answers are the same texts. The first rows are
    chosen, but none for a truth that half of them have. None: all truths are equal.
    """
    chosen: list[int] = []
    counts = collections.Counter[str]()
    for i, truth in enumerate(truths):
        if len(chosen) < most and counts[truth] < max(1, most // 2):
            chosen.append(i)
            counts[truth] += 1
    commonest, times = counts.most_common(1)[0]
    others = len(chosen) - times
    if not others:
        first = range(min(most, len(truths)))
        return list(first), [None for _ in first]
    surplus = [i for i in chosen if truths[i] == commonest][others:]
    chosen = sorted(set(chosen) - set(surplus), key=lambda i: truths[i])
    shift = min(times, others)  # beyond every row of the same truth
    return chosen, [chosen[(k + shift) % len(chosen)] for k in range(len(chosen))]


def _check(grade: Grade, prompts: list[Prompt], rows: int) -> SourceCheck:
    """Checks one source with the form of its answers that scores highest, because the format is up to the rule."""
    answered = [prompt for prompt in prompts if solutions(prompt)]
    if not answered:
        return _check_without_answers(grade, prompts[:rows])
    others = len(prompts) - len(answered)
    chosen, wrong_rows = _contrast([prompt.ground_truth or solutions(prompt)[0] for prompt in answered], rows)
    prompts = [answered[i] for i in chosen]
    partners = [None if row is None else chosen.index(row) for row in wrong_rows]
    texts = solutions(prompts[0])[:1]
    first = grade(prompts[:1], texts)
    if any(LATE in (reward.error or "") for reward in first):  # the others would take as long, each
        return _conclude(prompts[:1], [_Graded(texts, [], first, [])], [], others=others)
    forms = _grade_forms(grade, prompts, partners, [solutions(prompt) for prompt in prompts])
    blank = grade(prompts[:1] * 2, ["", _WORDS])
    separates = any(form.separates or form.errors() for form in forms)
    if not separates and any(prompt.ground_truth for prompt in prompts):
        forms += _grade_forms(grade, prompts, partners, [solutions(prompt, _FURTHER_FORMS) for prompt in prompts])
    return _conclude(prompts, forms, list(zip(["", _WORDS], blank, strict=True)), others=others)


@dataclasses.dataclass(frozen=True)
class _Graded:
    """One form of the answers of a source's rows, graded beside their own rows and as wrong answers of others."""

    texts: list[str]
    partners: list[int | None]  # the row whose text was each row's wrong answer; None: an empty response
    right: list[Reward]
    wrong: list[Reward]

    @property
    def separates(self) -> bool:
        return _mean_score(self.right) > _mean_score(self.wrong)

    @property
    def reads_truth(self) -> bool:
        """Whether a text earned another score beside another ground truth, or none was tried there."""
        pairs = [
            (self.right[j].score, wrong.score)
            for j, wrong in zip(self.partners, self.wrong, strict=True)
            if j is not None
        ]
        return not pairs or any(a != b for a, b in pairs)

    def errors(self) -> list[tuple[str, str]]:
        wrong_texts = ["" if j is None else self.texts[j] for j in self.partners]
        graded = zip(self.texts + wrong_texts, self.right + self.wrong, strict=True)
        return [(text, reward.error) for text, reward in graded if reward.error is not None]


def _grade_forms(
    grade: Grade, prompts: list[Prompt], partners: list[int | None], answers: list[list[str]]
) -> list[_Graded]:
    """Grades each form of the answers, in one call: a part that normalises scores uses the same scale for all."""
    forms = [[texts[min(i, len(texts) - 1)] for texts in answers] for i in range(len(answers[0]))]
    wrong = [["" if j is None else texts[j] for j in partners] for texts in forms]
    rewards = iter(grade(prompts * 2 * len(forms), [text for texts in forms + wrong for text in texts]))
    graded = [[next(rewards) for _ in prompts] for _ in range(2 * len(forms))]
    return [
        _Graded(*parts) for parts in zip(forms, [partners] * len(forms), graded, graded[len(forms) :], strict=False)
    ]


def _conclude(
    prompts: list[Prompt], forms: list[_Graded], further: list[tuple[str, Reward]], *, others: int
) -> SourceCheck:
    """Returns the result of the graded forms and of further responses; `others` rows have no answer."""
    best = max(forms, key=lambda form: _mean_score(form.right))
    scores = {reward.score for form in forms for reward in (*form.right, *form.wrong)}
    scores |= {reward.score for _, reward in further}
    errors = [error for form in forms for error in form.errors()]
    errors += [(text, reward.error) for text, reward in further if reward.error is not None]
    varies = len(scores) > 1 and any(prompt.ground_truth for prompt in prompts)
    return SourceCheck(
        source=prompts[0].data_source,
        rows=len(prompts),
        graded=sum(len(form.right) + len(form.wrong) for form in forms) + len(further),
        truth=_mean_score(best.right),
        wrong=_mean_score(best.wrong),
        errors=errors,
        example=best.texts[0],
        specified=all(_plain_truth(prompt.ground_truth)[1] and not solutions(prompt, ()) for prompt in prompts),
        reads_truth=not varies or any(form.reads_truth for form in forms),
        no_truth=_no_truth(prompts),
        notes=(f"{others} other rows have no answer",) if others else (),
    )


def _check_without_answers(grade: Grade, prompts: list[Prompt]) -> SourceCheck:
    """Scores a source whose rows have no answers: prompts as their own responses, empty responses, and two texts."""
    texts = [p.messages if isinstance(p.messages, str) else p.messages[-1]["content"] for p in prompts]
    responses = [*texts, *[""] * len(texts), _PROBE, _WORDS]
    rewards = grade([*prompts * 2, *prompts[:1] * 2], responses)
    echo_score, empty_score = _mean_score(rewards[: len(texts)]), _mean_score(rewards[len(texts) : -2])
    errors = [(text, r.error) for text, r in zip(responses, rewards, strict=True) if r.error is not None]
    return SourceCheck(
        prompts[0].data_source, len(prompts), len(rewards), echo_score, empty_score, errors, texts[0],
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
    return math.fsum(scores) / len(scores) if scores else float("-inf")  # whatever their order


def _report(findings: Sequence[SourceCheck]) -> str:
    """Formats a line per source, and a remedy for failures."""
    lines = []
    for finding in findings:
        text = str(finding).replace(" -inf", " no score")  # where all responses of a kind could not be graded
        lines.append(f"{'FAIL' if not finding.good else 'WARN' if finding.warning else 'OK  '} {text}")
        if finding.warning:
            lines.append(f"     {finding.warning}")
        if finding.errors:
            (response, error), count = finding.errors[0], len(finding.errors)
            first_error = error.replace("\n", "\n     | ")
            if count == finding.graded:
                lines.append(f"     the first: {first_error}")
            else:
                counted = f"{count} of {finding.graded} could not be graded"
                lines.append(f"     {counted}, the first {textwrap.shorten(response, 60)!r}: {first_error}")
                lines.append("     give every text a score, 0 without an answer: such samples are left out of training")
        elif not finding.good:
            lines.append(
                f"     the reward does not separate right from wrong answers; it graded {finding.example[-80:]!r};"
                f" check data_source, ground_truth and reward.*; {TRY_ANSWERS}"
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
