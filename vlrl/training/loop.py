"""The training loop: select prompts, generate, score, compute advantages, update, log; evaluate and save if due."""

from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.models.cost import share_out
from vlrl.models.shards import resolve_sharding
from vlrl.monitoring.metrics import group_metrics
from vlrl.monitoring.mismatch import check_mismatch
from vlrl.rollout.error_limits import check_errors, refuse_stale
from vlrl.rollout.group_source import GroupSource
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.session import Session
from vlrl.training.start import Start
from vlrl.training.update import update


def train(config: Config, make_source: type[GroupSource] = GroupSource,
          make_session: type[Session] = Session, start: Start | None = None) -> Session:
    """Trains up to `config.steps` steps or for `config.epochs`, by default resuming from a checkpoint. Returns the
    session, finished or stopped.

    The same seed gives the same weights (on a CPU bit for bit), even if the run was killed and resumed: every random
    generator is seeded by the seed and its purpose. make_source and make_session: classes of the source of groups and
    of the session. start: the result of check_start, if the run has been checked already."""
    config = resolve_sharding(config)
    accelerator = make_accelerator(config)
    algorithm = Algorithm(config)
    with make_session(config, accelerator) as session, comm.transport_errors():
        if config.epochs is not None:
            config = session.config  # with the steps that the rows give
            algorithm = Algorithm(config)
        parts = session.resume(assemble(config, accelerator, session.checkpoint, make_source, algorithm,
                                        session.progress.busy, start))
        policy, source, clock = parts.policy, parts.source, parts.clock
        for step in range(session.start, config.steps):
            comm.here.at(f"step {step}")
            with clock("sync"):
                source.sync(policy, step, session.evaluation_due(step))
            session.evaluate_if_due(step)
            if session.ended_early:
                break
            with clock("rollout"):
                groups = parts.credit(source.next_groups(config.rollout.prompts_per_step, step), step)
            with clock("train"):
                groups, loads = share_out(groups, policy.cost, config)
                own_groups = {method.section: method.draw(step, source.outcomes, session.flush)
                              for method in source.generator.methods}
            drawn = [*groups, *source.dropped]
            with session.keeping_failed(step, drawn):
                refuse_stale(groups, step, config)
                errors = check_errors(drawn, config.limits, f"step {step}")
                with clock("train"):
                    stats, per_token = update(policy, parts.optimizer, groups, config, step, algorithm, own_groups)
                    stats |= parts.credit.metrics()
                    stats |= algorithm.after_step(policy, parts.optimizer, stats, step + 1)
                check_mismatch(stats, config, step)
            with clock("store"):
                session.write(step, drawn, per_token)
            session.log(step, {**group_metrics(drawn, parts.task.labels), **loads, **stats,
                               "score_errors": errors["score_errors"],
                               **({"service_errors": errors["service_errors"]} if source.generator.services else {}),
                               **source.metrics()}, drawn)
            session.save_if_due(step + 1)
            if session.interrupted():
                break
        comm.here.at("after the last step")
        session.finish()
    return session
