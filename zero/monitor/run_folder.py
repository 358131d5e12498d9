"""The run folder: what a run writes into `"zero": {"report": "DIR"}` while it goes on, and others read.

DIR/run.json        by rank 0 at the start: {"time": seconds since 1970, "configuration": the JSON with its defaults,
                    "world": ranks, "stage": 0-3, "device": text, "versions": {name: text},
                    "units": [{"name", "numel", "bytes" of the whole parameters, "dtype"}, ...] as registered,
                    "plan": {kind: bytes per rank}} (where there is a plan)
DIR/rank-N.jsonl    by each rank: one JSON object on a line, flushed with it, so that SIGKILL loses at most one. In a
                    run that goes on with the same folder its lines follow those that are there, after another "start".
                    Numbers that are not finite are null; what is not known is left out. "time" is seconds since 1970.

Each line has "event":
    start       time, world, step: that the run begins from
    step        see `StepReport`: step, time, seconds, samples, tokens, global_samples, skipped, loss, norm, lr [..],
                scale, phases {name: seconds}, waits seconds, bytes {kind: bytes}, sent bytes, values {name: value}.
                On rank 0 loss, samples and tokens are over all ranks; on the others the rank's own, and no norm, lr or
                scale
    warning     time, text: what the log warned of
    unit_norms  step, units {name: [gradient, parameter, update]}: L2 norms over all ranks; rank 0 only
    timeline    step, spans [[stream, name, start_s, end_s], ...], counted from the begin of the step
    phase       time, phase: what the rank does now; written when it has changed, at most once a second
    end         time, status "ended" | "failed", error: text, with "failed"
A run without "end" was killed, or still goes on.
"""
