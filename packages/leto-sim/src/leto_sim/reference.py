"""The naive simulator: one run, one iteration at a time, one failure at a time.

Role: kept for ever as the reference that `leto_sim.des` must equal on every schedule (a deliberately plain
second writing of the same rules, with no shared arithmetic). Slow; for tests and for reading.
"""

from __future__ import annotations

from leto_sim.des import Lane, Result

__all__ = ["simulate_reference"]


def simulate_reference(lane: Lane) -> Result:
    """Return what `simulate([lane])[0]` must return, by stepping through every iteration."""
    s = lane.system
    horizon_s = lane.schedule.horizon_s
    failures = list(zip(lane.schedule.times_s.tolist(), lane.schedule.fatal.tolist(), strict=True))
    failures = [f for f in failures if f[0] < horizon_s]
    plain_s = lane.iteration_s * (1 + s.overhead_fraction)
    convert_s = s.conversion_iterations * (lane.interval * plain_s + s.checkpoint_stall_s)

    now_s = 0.0
    done = 0  # completed iterations of the job
    usable = 0  # newest usable checkpoint
    restored = 0  # checkpoint of the last rollback: nothing is committed again at it
    last_end_s = 0.0
    last_resume_s = 0.0
    free = [0.0] * lane.spares if lane.spares is not None else None
    fatal_count = during = 0
    down_s = lost_s = wait_s = 0.0
    since_kept_s = 0.0  # work since `done` was last reached or restored
    work_log: list[tuple[int, float]] = []  # (iteration, seconds) completed since the restored checkpoint
    index = 0

    def next_failure() -> float:
        return failures[index][0] if index < len(failures) else float("inf")

    while now_s < horizon_s:
        number = done + 1
        commits = number - s.commit_lag_iterations
        stalled = commits > restored and (commits - restored) % lane.interval == 0
        need_s = plain_s + (s.checkpoint_stall_s if stalled else 0.0)
        end_s = now_s + need_s
        if end_s <= min(next_failure(), horizon_s):
            now_s = end_s
            done = number
            last_end_s = now_s
            work_log.append((number, need_s))
            if stalled:
                usable = commits
            continue
        if next_failure() >= horizon_s:
            break
        # A failure interrupts this iteration; it and those during its recovery are handled until work
        # resumes.
        since_kept_s = next_failure() - now_s
        resume_s, hardware_s, in_fatal, first = 0.0, 0.0, False, True
        while index < len(failures) and (first or failures[index][0] < resume_s):
            t, fatal = failures[index]
            index += 1
            if not first:
                during += 1
                down_s -= resume_s - t
            fatal_count += fatal
            was_fatal = in_fatal and not first
            treat_fatal = fatal or was_fatal
            if first:
                lost_s += since_kept_s
            if treat_fatal or not s.retains_on_hof:
                lost_s += sum(seconds for i, seconds in work_log if i > usable)
                work_log = []
                done = restored = usable
            ready_s = max(t, hardware_s) if was_fatal else t
            since_resume_s = t - (last_resume_s if first else resume_s)
            cold = s.retains_on_hof and not treat_fatal and lane.shadow_rebuild_s > max(0.0, since_resume_s)
            if fatal and free is not None:
                spare = free.index(min(free))
                ready_s = max(ready_s, free[spare])
                free[spare] = max(ready_s, t + lane.repair_s)
            elif not treat_fatal and s.spare_on_hof and free is not None and min(free) > t:
                if s.initialize_hof_cold_s is None:
                    ready_s = min(free)
                else:
                    cold = True
            if treat_fatal:
                init_s = s.initialize_ff_s + convert_s
            else:
                init_s = s.initialize_hof_s
                if cold and s.initialize_hof_cold_s is not None:
                    init_s = s.initialize_hof_cold_s
                init_s += 0.0 if s.retains_on_hof else convert_s
            resume_s = ready_s + (s.detection_s + init_s)
            down_s += resume_s - t
            wait_s += ready_s - t
            hardware_s, in_fatal, first = ready_s, treat_fatal, False
        now_s = last_resume_s = resume_s

    if now_s > horizon_s:  # still recovering at the end
        down_s -= now_s - horizon_s
    progressed = last_end_s > last_resume_s
    elapsed_s = last_end_s if progressed else horizon_s
    return Result(
        ettr=done * lane.iteration_s / elapsed_s if done else 0.0,
        iterations=done,
        elapsed_s=elapsed_s,
        failures=index,
        fatal=fatal_count,
        during_recovery=during,
        downtime_s=down_s,
        lost_s=lost_s,
        wait_s=wait_s,
    )
