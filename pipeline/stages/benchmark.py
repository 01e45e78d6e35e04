"""`draftsmith evaluate --benchmark …`: drafters and methods on benchmarks, cell by cell, and the report."""

from __future__ import annotations

from pathlib import Path

from drafters.errors import UserError
from pipeline.benchmark.catalogue import conversations_of
from pipeline.benchmark.measuring import Evaluation
from pipeline.benchmark.plan import FOLDER, make_plan
from pipeline.benchmark.report import write_report
from pipeline.benchmark.summary import main_figures, make_report
from pipeline.benchmark.tables import short_table
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.models import read_tokenizer
from pipeline.stages.context import open_stage


def run_benchmarks(config: Config) -> Path:
    """Measure every cell that is not finished, and report on all; writes `<output>/benchmark/report` and `result.json`.

    Raises:
        UserError: for what is not there or does not fit, before anything is decoded; or when decoding fails.
    """
    plan = make_plan(config)
    facts = read_tokenizer(config)
    for way in plan.ways:
        if way.server is not None and way.server.target_id not in (None, facts.identity.target_id):
            raise UserError(
                f"--url {way.server.url}: serves {way.server.target_id}, the configuration's target is "
                f"{facts.identity.target_id}; prompts would mean other text"
            )
    with open_stage(config, FOLDER) as stage:
        for drafter in plan.drafters:
            stage.result.add_input(drafter.directory)
        asked = {spec.name: conversations_of(spec, config) for spec in plan.benchmarks}
        evaluation = Evaluation(stage, plan, facts, asked)
        with stage.result.section("measure"):
            cells = evaluation.measure()
        with stage.result.section("report"):
            report = make_report(evaluation, cells)
            directory = write_report(stage.output / "report", report, cells)
        stage.result.add_output(directory)
        stage.result.metrics |= {"target_id": facts.identity.target_id, "cells": main_figures(report)}
        stage.tracked.log_artifact(directory)
        table = short_table(report)
        show_table(table.caption, table.columns, table.rows)
        say(f"report: {directory / 'report.html'}")
        return stage.output
