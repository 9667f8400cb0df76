"""What processes of a run did in its largest step, beside what the simulator makes of their times."""

from __future__ import annotations

from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan_cli.progress import note_compilation
from chunkplan_cli.terminal import note, print_json

#: Beside it, in the folder of a run.
MEASURED, TIMELINE = "measured.json", "timeline.json"


def show_run(run: Path, trace: Path | None, *, alone: bool = True, as_json: bool = False) -> None:
    """Print a table of the step that a run on several processes has measured; `trace`: where a Chrome trace goes.

    `run`: its folder, or the file in it. `alone`: whether nothing else was asked for, of which there is nothing to show
    here.

    Raises:
        UsageError: it is not alone, the run has measured none, its plan is gone, or `trace` cannot be written.
        DataError: a file is damaged.
    """
    from chunkplan.planfile.measured import read_measured
    from chunkplan.reporting.replay import describe_replays, replay_step, replays_to_dict, write_timeline

    if not alone:
        raise UsageError(
            "--run is for the step that was measured, as it was", hint="beside it give --trace or --json alone"
        )
    measured = read_measured(run if run.is_file() else run / MEASURED)
    with note_compilation():
        replays = replay_step(measured)
    step, planned = measured.times[0].step, measured.planned
    if as_json:
        document = {"plan": str(measured.plan.path), "step": step, "dp": measured.dp}
        print_json(document | replays_to_dict(replays, measured.dp, planned=planned))
    else:
        for line in describe_replays(replays, measured.dp, step, planned=planned):
            print(line)
    if trace is not None:
        write_timeline(trace, replays, planned=planned, content_hash=measured.plan.content_hash)
        note(f"trace in {trace}: open it at https://ui.perfetto.dev")
