"""Validation during a run."""

from jppo import validation
from jppo.build.rollout import val_sampling
from jppo.run.opened import Run


def validate(run: Run, version: int) -> dict[str, float]:
    """Returns validation metrics; samples go to the run folder, a few to the console and the loggers."""
    c = run.c
    tested = validation.evaluate(
        run.sampler,
        run.inputs.val.prompts,
        run.panel.testing(),
        sampling=val_sampling(c),
        version=version,
        batch_size=c.data.val_batch_size,
        hosts=run.hosts,
    )
    run.logger.samples(f"test_{version}", validation.rows(tested))
    some = validation.shown(tested, c.trainer.log_val_generations)
    for row in some:
        run.logger.note(validation.line(row))
    run.logger.generations(version, some)
    return validation.metrics(tested)
