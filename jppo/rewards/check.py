"""Tests a reward on the data's own solutions: python -m jppo.rewards.check --config=configs/gsm8k.py

    python -m jppo.rewards.check --config.data.train_files=train.jsonl --config.reward.function=reward.py

For the first rows of each data source, the run's reward grades the row's right answer and another row's answer. A
source fails if right answers earn no more than wrong ones, because training could not learn from such a reward. Rows
without an answer are scored with an empty response and with the prompt as the response; such a source fails only by
errors, and suspicious scores are a warning. Exit code 1 if one fails. Settings are given as
--config.SECTION.NAME=VALUE; those of models, batches and engines are not read.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

from jppo import process, settings
from jppo.data.prompts import SOLUTIONS, make_prompt, prompt_of
from jppo.data.rows import read_sources
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError, expanded
from jppo.learner import sharding
from jppo.learner.make import make_mesh
from jppo.rewards.graders import describe_refused
from jppo.rewards.make import make_refusal, make_reward_sum, needed_columns
from jppo.rewards.parts import RewardSum, Sample
from jppo.run.inputs import columns_of
from jppo.runlog.durable_files import missing_folders, remove_unused
from jppo.settings import Settings
from jppo.types import Prompt, Reward

_ROWS = 8  # per source
NO_TRUTH = "no row has a ground truth, so a function that reads it gets ''; data.ground_truth_key names its column"
SLOW_S = 1.0  # a report names the time of rewards that took longer
# Characters of most kinds, for functions that count some of them or search for a format.
_PROBE = 'No! Is 3 + 4 = "7"? (Yes.)\n<answer>\\boxed{7}</answer>\n```python\nprint([7])\n```\n{"A": 7}\n#### 7'
# Forms of a ground truth for sources without solutions, as the rules read them; tried in turn.
_FORMS = ("#### {}", "\\boxed{{{}}}", "The answer is {}.", "{}")


@dataclasses.dataclass(frozen=True)
class SourceCheck:
    """The result for one source."""

    source: str
    rows: int
    graded: int  # responses
    truth: float  # mean score of right answers
    wrong: float  # mean score of other rows' answers
    errors: list[str]
    example: str  # a right answer that was graded
    answers: bool = True  # False: `truth` is of the prompt as the response, `wrong` of an empty response
    no_truth: str = ""  # the warning that no row has a ground truth
    constant: bool = False  # all responses had one score
    cost: str = ""  # the time of a slow reward

    @property
    def good(self) -> bool:
        """Whether the reward separates right from wrong answers, or without answers scores at all."""
        return not self.errors and (self.truth > self.wrong or not self.answers)

    @property
    def warning(self) -> str:
        """Returns a possible mistake in a reward that passes, with its remedy; '' if there is none."""
        if not self.good:
            return ""
        reason = ""
        if not self.answers and self.wrong > self.truth:
            reason = "an empty response earns more: the policy may learn to say nothing"
        elif self.constant:
            reason = f"every response that was tried earns {self.truth:.3g}: check that the function reads the response"
        return "; ".join(filter(None, (reason, self.no_truth if reason or self.answers else "")))

    def __str__(self) -> str:
        template = "right answers earn {:.3g}, others' {:.3g}"
        if not self.answers:
            template = "no answers in the data; the prompt as the response earns {:.3g}, an empty response {:.3g}"
        return f"{self.source}: {template.format(self.truth, self.wrong)} ({self.rows} rows{self.cost})"


def check_sources(reward_sum: RewardSum, prompts: Sequence[Prompt]) -> list[SourceCheck]:
    """Returns a finding for each data source, from its first rows."""
    checks = []
    for source in sorted({prompt.data_source for prompt in prompts}):
        start = time.monotonic()
        check = _check(reward_sum, [p for p in prompts if p.data_source == source])
        seconds = time.monotonic() - start
        cost = f", {seconds:.1f} s for {check.graded} responses" if seconds >= SLOW_S else ""
        checks.append(dataclasses.replace(check, cost=cost))
    return checks


def solutions(prompt: Prompt) -> list[str]:
    """Returns right answers: the worked solution first, then the ground truth in the forms that rules read."""
    tables = [prompt.extra, prompt.extra.get("extra_info") or {}]
    worked = [table[name] for table in tables for name in SOLUTIONS if isinstance(table.get(name), str)]
    return worked + [form.format(prompt.ground_truth) for form in _FORMS if prompt.ground_truth]


def _check(reward_sum: RewardSum, prompts: list[Prompt]) -> SourceCheck:
    """Checks one source with the form of its answers that scores highest, because the format is up to the rule."""
    answered = [prompt for prompt in prompts if solutions(prompt)]
    if not answered:
        return _check_without_answers(reward_sum, prompts[:_ROWS])
    without, prompts = len(prompts) - len(answered), answered[:_ROWS]
    solutions_of = [solutions(prompt) for prompt in prompts]
    truths = [prompt.ground_truth or texts[0] for prompt, texts in zip(prompts, solutions_of, strict=True)]
    # The first row with another truth; None if all are equal.
    other_rows = [next((j for j, other in enumerate(truths) if other != truth), None) for truth in truths]
    right_texts = [[texts[min(i, len(texts) - 1)] for texts in solutions_of] for i in range(len(solutions_of[0]))]
    wrong_texts = [[None if j is None else right[j] for j in other_rows] for right in right_texts]
    answers = right_texts + wrong_texts
    # All at once: a part that normalises scores uses the same scale for all.
    all_rewards = iter(_grade_texts(reward_sum, prompts * len(answers), [text for texts in answers for text in texts]))
    graded_forms = [[next(all_rewards) for _ in prompts] for _ in answers]
    means = [_mean_score(rewards) for rewards in graded_forms[: len(right_texts)]]
    best_form = max(range(len(means)), key=lambda i: means[i])
    best_answers, wrong_rewards = right_texts[best_form], graded_forms[len(right_texts) + best_form]
    errors = [r.error for r in (*graded_forms[best_form], *wrong_rewards) if r.error is not None]
    return SourceCheck(
        source=prompts[0].data_source,
        rows=len(prompts),
        graded=len(prompts) * len(answers),
        truth=means[best_form],
        wrong=_mean_score(wrong_rewards),
        errors=errors,
        example=best_answers[0],
        no_truth=f"{without} other rows have no answer" if without else _no_truth(prompts),
    )


def _check_without_answers(reward_sum: RewardSum, prompts: list[Prompt]) -> SourceCheck:
    """Scores a source whose rows have no answers: each prompt as its own response, an empty response, and a probe."""
    texts = [p.messages if isinstance(p.messages, str) else p.messages[-1]["content"] for p in prompts]
    rewards = _grade_texts(reward_sum, [*prompts * 2, prompts[0]], [*texts, *[None] * len(texts), _PROBE])
    echo_score, empty_score = _mean_score(rewards[: len(texts)]), _mean_score(rewards[len(texts) : -1])
    errors = [r.error for r in rewards if r.error is not None]
    return SourceCheck(
        prompts[0].data_source, len(prompts), len(rewards), echo_score, empty_score, errors, texts[0], answers=False,
        no_truth=_no_truth(prompts), constant=len({reward.score for reward in rewards}) == 1,
    )  # fmt: skip


def _no_truth(prompts: Sequence[Prompt]) -> str:
    """Returns the warning that no row has a ground truth, with columns that could be it; '' without such a column."""
    columns = sorted({name for prompt in prompts for name, value in prompt.extra.items() if value not in (None, "")})
    if not columns or any(prompt.ground_truth for prompt in prompts):
        return ""
    return f"{NO_TRUTH}, perhaps {' or '.join(map(repr, columns))}"


def _grade_texts(reward_sum: RewardSum, prompts: Sequence[Prompt], texts: Sequence[str | None]) -> list[Reward]:
    """Returns the rewards of the texts as responses to the prompts; None is an empty response."""
    responses = [text or "" for text in texts]  # without another truth: an empty answer is wrong
    return reward_sum.grade(
        Sample(prompt, text, len(text.split()), "stop") for prompt, text in zip(prompts, responses, strict=True)
    )


def _mean_score(rewards: Sequence[Reward]) -> float:
    scores = [r.score for r in rewards if r.error is None]
    return sum(scores) / len(scores) if scores else float("-inf")


def _report(findings: Sequence[SourceCheck]) -> str:
    """Formats a line per source, and a remedy for failures."""
    lines = []
    for finding in findings:
        text = str(finding).replace(" -inf", " no score")  # of responses that could not be graded
        lines.append(f"{'FAIL' if not finding.good else 'WARN' if finding.warning else 'OK  '} {text}")
        if finding.warning:
            lines.append(f"     {finding.warning}")
        if finding.errors:
            lines.append(f"     {len(finding.errors)} could not be graded; the first: {finding.errors[0]}")
        elif not finding.good:
            lines.append(
                f"     the reward does not separate right from wrong answers; it graded {finding.example[-80:]!r};"
                " check data_source, ground_truth and reward.*, unless your function does not use right answers"
            )
            if finding.no_truth:
                lines.append(f"     {finding.no_truth}")
    return "\n".join(lines)


def _require_answers(environment: str, agent: str, agent_reward: str) -> None:
    """Raises UserError where the reward is an environment's or an agent program's, which no row has an answer for."""
    judged = ""
    if environment:
        judged = f"rollout.multi_turn.environment={environment!r} rewards the turns of a conversation"
    elif agent and agent_reward != "graders":
        judged = f"rollout.agent_reward={agent_reward!r} rewards what an agent program does"
    if judged:
        raise UserError(f"{judged}, and the data has no right answers to test it with; read the samples of a short run")


def _keep_gradable(prompts: list[Prompt], refuse: Callable[[str, str], str]) -> list[Prompt]:
    """Returns the prompts that a run would train on, and prints how many rows it would leave out."""
    reasons = {prompt.uid: refuse(prompt.data_source, prompt.ground_truth) for prompt in prompts}
    refused_rows = [f"{uid}: {why}" for uid, why in reasons.items() if why]
    if notice := describe_refused(refused_rows):
        print(notice)
    if len(refused_rows) == len(prompts):
        raise UserError("data.train_files: no row is left; change the asserts, or set reward.code.tests=native")
    return [prompt for prompt in prompts if not reasons[prompt.uid]]


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Grades answers of the data by the run's reward, and prints a line for each source."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, __doc__, settings.default(), needs_file=False)
    for section, name in (("model", "path"), ("data", "val_files")):  # not read
        config[section][name] = config[section][name] or "-"
    c = settings.typed(config, Settings, training=False)
    if switches["dry_run"]:
        print(settings.dump(c), end="")
        return
    _require_answers(c.rollout.multi_turn.environment, c.rollout.agent, c.rollout.agent_reward)
    needs_tokenizer = c.data.custom_cls or c.reward.model.step_aggregation
    tokenizer = load_tokenizer(c.model.path) if needs_tokenizer else None
    tools = bool(c.rollout.multi_turn.tool_config_path) and "tool_score" in c.reward.weights
    files = read_sources(
        c.data.train_files, "data.train_files", custom_cls=c.data.custom_cls, tokenizer=tokenizer, columns=columns_of(c)
    )
    needed = needed_columns(c, tools)
    all_prompts = [
        make_prompt(row, prompt_of(row, c.data.prompt_role), [], file.name, needed)
        for file in files
        for row in file.rows
    ]
    prompts = _keep_gradable(all_prompts, make_refusal(c))
    mesh = make_mesh(c)
    process.prepare_process(sharding.platform(mesh), c.trainer.compile_cache, c.model.compute_dtype)
    sources = sorted({prompt.data_source for prompt in prompts})
    created = missing_folders(expanded(c.trainer.run_dir))
    with contextlib.ExitStack() as stack:
        stack.callback(remove_unused, created)  # where the graders' log is empty
        reward_sum = make_reward_sum(c, mesh, tokenizer=tokenizer, sources=sources, tool_rewards=tools)
        stack.callback(reward_sum.close)
        reward_sum.ready()
        findings = check_sources(reward_sum, prompts)
    print(_report(findings))
    if not all(finding.good for finding in findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
