"""Pictures of a report. A router looks the same in all (eval/style.py), and nothing hangs on colour alone."""

import math
import statistics

import matplotlib.pyplot as plt
import numpy as np

from eval.pictures import finish, load_bar
from eval.style import style
from scripts.report.claims import differences, interval

MARKS = 12  # on a line, or not many more
PAPERS = {"marker": "D", "markersize": 9, "color": "black", "markerfacecolor": "none", "linestyle": "none"}


def losses(setting, path):
    """Validation loss, mean over seeds, by steps and tokens and, where it was measured, by time of training."""
    figure, by_step, by_time = step_and_time(setting)
    steps = setting.steps
    for arm in setting.arms:
        look = looks(setting, arm)
        means = [statistics.fmean(arm.losses(step)) for step in steps]
        by_step.plot(steps, means, label=f"{arm.label}: {means[-1]:.4f}", **look, markevery=marked(setting, arm, steps))
        if len(arm.seeds) > 1:
            ends = [(min(at), max(at)) for at in map(arm.losses, steps)]
            by_step.fill_between(steps, *zip(*ends, strict=True), color=look["color"], alpha=0.2, linewidth=0)
        if clock := clock_of(setting, arm):
            timed = [(clock[step], mean) for step, mean in zip(steps, means, strict=True) if step in clock]
            by_time.plot(*zip(*timed, strict=True), **look, markevery=marked(setting, arm, timed))
    low = min(statistics.fmean(arm.losses(setting.end)) for arm in setting.arms)
    late = steps[len(steps) // 4 :]
    high = max(statistics.fmean(arm.losses(step)) for arm in setting.arms for step in late)
    margin = 0.06 * (high - low) or 0.1
    by_step.set(ylabel="validation loss, nats a token")
    for axes in filter(None, (by_step, by_time)):
        axes.set(ylim=(low - margin, high + margin))
    legend(figure, by_step, f"mean over seeds at step {setting.end:,}")
    finish(figure, path)


def leads(setting, baseline, path):
    """Loss minus the baseline's: paired, with 95% intervals, by steps and tokens; at equal time of training. False
    without a step of training."""
    steps = [step for step in setting.steps if step]
    if not steps:
        return False
    figure, by_step, by_time = step_and_time(setting)
    shown = [0.0]
    for arm in setting.arms:
        base = setting.counterpart(arm, baseline)
        if base is None:
            continue
        look = looks(setting, arm)
        found = [interval([differences(arm, base, step)]) for step in steps]
        means = [one.mean for one in found]
        shift = 0.006 * steps[-1] * (setting.arms.index(arm) - len(setting.arms) / 2)  # bars do not hide others
        places, (begin, every) = [step + shift for step in steps], marked(setting, arm, steps)
        barred = [(x, one) for x, one in zip(places, found, strict=True) if not math.isnan(one.low)][begin::every]
        by_step.errorbar(
            [x for x, _ in barred],
            [one.mean for _, one in barred],
            [one.mean - one.low for _, one in barred],
            fmt="none",
            ecolor=look["color"],
            elinewidth=0.8,
            capsize=2,
        )
        by_step.plot(places, means, label=arm.label, **look, markevery=(begin, every))
        shown += [end for one in found[len(found) // 4 :] for end in one[:3] if not math.isnan(end)]
        if by_time and (mine := at_equal_times(setting, arm, base, steps)):
            by_time.plot(*zip(*mine, strict=True), **look, markevery=marked(setting, arm, mine))
            shown += [value for _, value in mine[len(mine) // 4 :]]
    margin = 0.15 * (max(shown) - min(shown)) or 0.01
    for axes in filter(None, (by_step, by_time)):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(ylim=(min(shown) - margin, max(shown) + margin))
    by_step.set(ylabel=f"loss minus {baseline}'s, nats a token")
    if by_time:
        by_time.set(ylabel=f"loss minus {baseline}'s at that time")
    legend(figure, by_step, "above 0: worse")
    finish(figure, path)
    return True


def at_equal_times(setting, arm, base, steps):
    """[(time, loss of `arm` then minus that of `base` at that time)], while both were training, by seeds of both."""
    seeds = arm.shared(base)
    mine, theirs = (
        [
            (clock[step], statistics.fmean(one.runs[seed].loss(step) for seed in seeds))
            for step in steps
            if step in clock
        ]
        for one, clock in ((arm, clock_of(setting, arm)), (base, clock_of(setting, base)))
    )
    if not theirs:
        return []
    times, values = zip(*theirs, strict=True)
    return [(at, loss - np.interp(at, times, values)) for at, loss in mine if times[0] <= at <= times[-1]]


def ends(settings, baseline, paper, path):
    """Where each arm ends against the baseline, with 95% intervals; the paper's difference as an open diamond, True if
    there is one."""
    rows = [(s, arm, base) for s in settings for arm in s.arms if (base := s.counterpart(arm, baseline))]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    names, printed = [], False
    for place, (setting, arm, base) in enumerate(rows):
        names.append(f"{setting.label}: {arm.label}" if setting.label else arm.label)
        found, look = interval([differences(arm, base, setting.end)]), looks(setting, arm)
        axes.plot([found.low, found.high], [place, place], color=look["color"], linewidth=2)
        axes.plot([found.mean], [place], color=look["color"], marker=look["marker"], linestyle="none")
        comparable = paper and paper.same_tokens(setting)
        theirs = paper.difference(setting, arm.router, base.router, setting.tenth(setting.end)) if comparable else None
        if theirs is not None:
            axes.plot([theirs], [place], **PAPERS)
            printed = True
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set(
        ylim=(len(names) - 0.4, -0.6),
        xlabel=f"loss {when(settings)} minus {baseline}'s, nats a token (right of 0: worse)",
    )
    axes.grid(axis="x", alpha=0.3)
    if printed:
        axes.plot([], [], **PAPERS, label="the paper's")
    legend(figure, axes)
    finish(figure, path)
    return printed


def routing(setting, path):
    """Imbalance of loads, entropy of gates and γ over training, means over layers and seeds; False if there is none."""
    wanted = {
        "router/load_imbalance": "busiest expert's load / mean load",
        "router/entropy": "entropy of the gates, nats",
        "router/gamma": "γ",
    }
    lines = {arm.label: {key: over_training(arm, key) for key in wanted} for arm in setting.arms}
    shown = [key for key in wanted if any(found[key] for found in lines.values())]
    if not shown:
        return False
    figure, every = panels(len(shown))
    for axes, key in zip(every, shown, strict=True):
        for arm in setting.arms:
            if points := lines[arm.label][key]:
                every_so = marked(setting, arm, points)
                axes.plot(*zip(*points, strict=True), label=arm.label, **looks(setting, arm), markevery=every_so)
        axes.set(xlabel="steps", ylabel=wanted[key])
        axes.grid(alpha=0.3)
    K, E = setting.values["model.top_k"], setting.values["model.n_expert"]
    if "router/load_imbalance" in shown:
        every[shown.index("router/load_imbalance")].set_title(f"1: balanced; {E / K:g}: all tokens to {K} experts")
    if "router/entropy" in shown:
        every[shown.index("router/entropy")].set_title(f"{math.log(E):.2f}: all {E} experts alike")
    legend(figure, max(every, key=lambda axes: len(axes.lines)))
    finish(figure, path)
    return True


def loads(setting, path):
    """Load of each expert over the mean at the end, a row of panels an arm: by layer and expert, and each layer's in
    order of size. False without loads."""
    arms = [(arm, shares) for arm in setting.arms if (shares := load_shares(setting, arm)) is not None]
    if not arms:
        return False
    L, E = arms[0][1].shape
    height = 0.55 + 0.14 * max(L, 3)
    figure, every = plt.subplots(
        *(len(arms), 2),
        figsize=(12, 1.3 + height * len(arms)),
        layout="constrained",
        width_ratios=(3, 1),
        squeeze=False,
        sharex="col",
    )
    top = max(8, 1.2 * max(float(shares.max()) for _, shares in arms))
    for (arm, shares), (heat, ranked) in zip(arms, every, strict=True):
        with np.errstate(divide="ignore"):
            image = heat.imshow(np.log2(shares), aspect="auto", cmap="Greys", vmin=-3, vmax=3, interpolation="nearest")
        heat.set(ylabel="layer", yticks=range(0, L, max(1, L // 6)))
        heat.set_title(f"{arm.label}, seed {arm.seeds[0]}", loc="left", fontsize=9)
        layers, experts = np.nonzero(shares == 0)
        heat.plot(experts, layers, "kx", markersize=min(5, 300 / E), scalex=False, scaley=False)
        for layer in range(L):
            tone = str(0.75 * layer / max(1, L - 1))
            line = np.sort(shares[layer][shares[layer] > 0])[::-1]
            ranked.plot(line, color=tone, linestyle="-" if layer % 2 else "--", linewidth=1)
        ranked.set_yscale("log", base=2)
        ranked.set(ylim=(1 / 16, top))
        ranked.set_ylabel("load / mean", fontsize=8)
        ranked.set_yticks([1 / 8, 1, 8], ["1/8", "1", "8"])
        ranked.grid(alpha=0.3)
    every[-1][0].set_xlabel("expert")
    every[-1][1].set_xlabel("experts, busiest first")
    load_bar(figure, image, every, "load / mean load; ×: no token", 0.5)
    finish(figure, path)
    return True


def load_shares(setting, arm):
    """(layers, experts): load over the layer's mean in the last evaluation of the arm's first seed, or None."""
    line = arm.runs[arm.seeds[0]].evaluations[setting.end]
    if not line.get("val/loads"):
        return None
    counts = np.array(line["val/loads"], dtype=np.float64)
    return counts / counts.mean(1, keepdims=True)


def speed(setting, path):
    """Tokens a second, median over the log's lines, with quartiles; False without."""
    found = [(arm, speeds) for arm in setting.arms if len(speeds := speeds_of(arm)) > 1]
    if not found:
        return False
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.32 * len(found)), layout="constrained")
    for place, (_, speeds) in enumerate(found):
        low, middle, high = statistics.quantiles(speeds, n=4)
        axes.barh(place, middle, color="#bbbbbb", edgecolor="black", height=0.6, zorder=2)
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3, zorder=3)
    axes.set_yticks(range(len(found)), [arm.label for arm, _ in found])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylim=(len(found) - 0.4, -0.6), xlabel="tokens a second: median and quartiles over the lines of the log")
    axes.grid(axis="x", alpha=0.3)
    finish(figure, path)
    return True


def axis(settings, key, path):
    """Loss at the end against what was swept, a line a router; a panel for each corpus. False if more than one setting
    of a corpus has the same value."""
    corpora = {}
    for setting in sorted(settings, key=lambda setting: (setting.values["data.name"], setting.values[key])):
        corpora.setdefault(setting.values["data.name"], []).append(setting)
    if any(len({setting.values[key] for setting in mine}) < len(mine) for mine in corpora.values()):
        return False
    figure, every = panels(len(corpora))
    for axes, (corpus, mine) in zip(every, corpora.items(), strict=True):
        lines = {}
        for setting in mine:
            for arm in setting.arms:
                point = setting.values[key], statistics.fmean(arm.losses(setting.end))
                lines.setdefault(arm.label, (looks(setting, arm), []))[1].append(point)
        for label, (look, points) in lines.items():
            axes.plot(*zip(*points, strict=True), label=label, **look)
        axes.set_xscale("log", base=2)
        ticks = [setting.values[key] for setting in mine]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set(title=corpus, xlabel=key, ylabel=f"validation loss {when(mine)}, nats a token")
        axes.grid(alpha=0.3)
    legend(figure, max(every, key=lambda axes: len(axes.lines)))
    finish(figure, path)
    return True


def when(settings):
    """Where runs of these settings are compared, in words."""
    return "at the end" if all(s.end == s.max_steps for s in settings) else "at the last common step"


def over_training(arm, key):
    """[(step, mean over seeds)] of a number in the log's lines, at steps that all seeds have."""
    columns = [{line["step"]: line[key] for line in arm.runs[seed].logs if key in line} for seed in arm.seeds]
    return [
        (step, statistics.fmean(c[step] for c in columns)) for step in columns[0] if all(step in c for c in columns)
    ]


def time_unit(setting):
    """(seconds, its name) of the unit that suits the longest of the runs."""
    longest = max(max(run.seconds().values()) for run in setting.runs)
    return next(
        unit for unit in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest >= 2 * unit[0] or unit[0] == 1
    )


def clock_of(setting, arm):
    """{step evaluated: time of training in the setting's unit, median over seeds}, empty if it was not measured.
    Between lines of the log time is a straight line."""
    clocks, unit = [arm.runs[seed].seconds() for seed in arm.seeds], time_unit(setting)[0]
    last = min(map(max, clocks))
    return {
        step: statistics.median(np.interp(step, [*clock], [*clock.values()]) for clock in clocks) / unit
        for step in setting.steps
        if last and step <= last
    }


def speeds_of(arm):
    return [
        line["perf/tokens_per_sec"]
        for seed in arm.seeds
        for line in arm.runs[seed].logs
        if "perf/tokens_per_sec" in line
    ]


def looks(setting, arm):
    """style() of its router; arms of one router differ in their markers' faces."""
    twins = [other for other in setting.arms if other.router == arm.router]
    faces = ("full", "none", "left", "right", "top", "bottom")
    return style(arm.router) | {"fillstyle": faces[twins.index(arm) % len(faces)], "markersize": 5, "linewidth": 1.3}


def marked(setting, arm, points):
    """`markevery` of a line: fewer than twice MARKS, and not all arms' at the same points."""
    every = max(1, len(points) // MARKS)
    return setting.arms.index(arm) % every, every


def panels(number):
    figure, every = plt.subplots(1, number, figsize=(6 * number, 5), layout="constrained", squeeze=False)
    return figure, every[0]


def step_and_time(setting):
    """A figure, its panel by steps, with tokens above, and that by time of training, None if it was not measured."""
    timed = any(clock_of(setting, arm) for arm in setting.arms)
    figure, (by_step, *rest) = panels(2 if timed else 1)
    unit, name = (1e9, "billions") if setting.tokens * setting.max_steps >= 1e9 else (1e6, "millions")
    scale = setting.tokens / unit
    above = by_step.secondary_xaxis("top", functions=(lambda x: x * scale, lambda x: x / scale))
    above.set_xlabel(f"training tokens, {name}")
    by_step.set(xlabel="steps")
    by_step.xaxis.set_major_formatter("{x:,.0f}")
    for axes in rest:
        axes.set(xlabel=f"{time_unit(setting)[1]} of training, without evaluation and saving")
    for axes in (by_step, *rest):
        axes.grid(alpha=0.3)
    return figure, by_step, rest[0] if rest else None


def legend(figure, axes, title=None):
    """Below the panels, of which it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = max(1, int(15 * figure.get_figwidth() / (10 + max(map(len, labels)))))
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            title=title,
            ncols=min(columns, len(labels)),
            fontsize=9,
            handlelength=3.5,
            frameon=False,
        )
