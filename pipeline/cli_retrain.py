"""`draftsmith retrain`: one round for a scheduler, and the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from drafters.errors import UserError
from pipeline.invocation import (
    ConfigArgument,
    Invocation,
    OutputOption,
    ServeOption,
    SetOption,
    SpoolOption,
    command,
)

retrain_app = typer.Typer(no_args_is_help=True, help="Retrain when traffic drifts: once, or on a schedule.")

FailuresOnlyOption = Annotated[
    bool,
    typer.Option(
        "--failures-only",
        show_default=False,
        help="Exit with 0 for 3, 4 and 5 too, for schedulers that take every other code for a failure.",
    ),
]


@command(retrain_app, "run-once")
def run_once(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    spool: SpoolOption = None,
    serve: ServeOption = None,
    failures_only: FailuresOnlyOption = False,
) -> None:
    """Look for drift, and run one online round if there is reason to.

    Reads what traffic left since the last round: how much, how well the champion drafts it, and how its domains have
    shifted. With enough new records and a reason (retrain.*), trains, gates, registers, swaps and watches one challenger;
    otherwise says why not and leaves the records for the next call. A lock keeps two calls, or a call and a running
    distill --online, apart; a call that was killed is continued by the next.

    Exit codes: 0 a challenger is champion (or waits for promotion, retrain.deploy), 2 bad input, 3 nothing to do, 4 the
    gate or the canary turned the challenger down, 5 another trainer works here, 6 servers did not take it.

    Writes OUTPUT/retrain/result.json and OUTPUT/online.

    Example: draftsmith retrain run-once mine.yaml --spool /var/spool/draftsmith --serve http://127.0.0.1:30000
    """
    call = Invocation(config, assignments, output, False)
    log = _log(call, spool, "run-once")
    code = 0

    def stage() -> Path:
        from pipeline.fleet import connect
        from pipeline.stages.retrain import FAILURES, retrain_once

        nonlocal code
        done = retrain_once(call.config, log=log, servers=connect(call.config, serve or []))
        code = 0 if failures_only and done.outcome not in FAILURES else int(done.outcome)
        return done.output

    with _locked_as(0 if failures_only else 5):
        call.execute("retrain run-once", stage, then=None)
    if code:
        raise typer.Exit(code)


@command(retrain_app, "schedule")
def schedule(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    spool: SpoolOption = None,
    serve: ServeOption = None,
    upcoming: Annotated[
        bool, typer.Option("--next", show_default=False, help="Print the next five starts, and stop.")
    ] = False,
) -> None:
    """Run `retrain run-once` on a schedule, until SIGTERM.

    schedule.cron or schedule.every_minutes says when. Each run is a process of its own: its memory is given back, and a crash
    does not end the schedule. Runs never overlap. Starts missed while the scheduler was down are made up for by one, within
    schedule.misfire_grace_s. SIGTERM waits for the run under way. Exits with 1 when it can start nothing more, so
    that a supervisor starts it again.

    Needs the extra: pip install 'draftsmith[schedule]'. Writes OUTPUT/schedule, which is private: its job store holds pickled
    jobs.

    Example: draftsmith retrain schedule mine.yaml --spool /var/spool/draftsmith --set schedule.cron="30 3 * * *"
    """
    call = Invocation(config, assignments, output, False)
    log = _log(call, spool, "schedule")
    settings = call.config.schedule
    if upcoming:
        from datetime import UTC, datetime

        from pipeline.schedule.rhythm import next_times

        for moment in next_times(settings, 5, datetime.now(UTC)):
            typer.echo(moment.strftime("%a %Y-%m-%d %H:%M:%S %z"))
        return
    from pipeline.schedule.service import ScheduleBroken, stop_on_signals
    from pipeline.schedule.service import serve as serve_schedule

    try:
        with _locked_as(5), stop_on_signals() as stop:
            serve_schedule(call.config, _run_once_command(call, log, serve or []), stop)
    except ScheduleBroken as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def _locked_as(code: int) -> Iterator[None]:
    """Exit with this code where another process holds the lock."""
    from pipeline.lock import Locked

    try:
        yield
    except Locked as error:
        print(f"locked: {error}", file=sys.stderr)
        raise typer.Exit(code) from None


def _run_once_command(call: Invocation, log: str, serve: list[str]) -> list[str]:
    """The command line of one run, with this interpreter. -P: a folder `pipeline` where it starts is not ours."""
    source = call.source.absolute() if call.source.is_file() else call.source
    words = [sys.executable, "-P", "-m", "pipeline", "retrain", "run-once", str(source), "--spool", log]
    for assignment in call.assignments or []:
        words += ["--set", assignment]
    if call.output is not None:
        words += ["--output", str(call.output)]
    for url in serve:
        words += ["--serve", url]
    return words


def _log(call: Invocation, spool: str | None, name: str) -> str:
    log = spool or call.config.sglang.log
    if log is None:
        raise UserError(f"retrain {name}: needs --spool DIR or redis://…, or sglang.log in the config")
    return log
