"""The report of eval.routing: page.md filled with the content of routing.json, as blocks for scripts.report.pages."""

from math import exp
from pathlib import Path

from eval.routing.counts import MIN_COUNT, Described
from scripts.report.pages import Block

TEMPLATE = Path(__file__).with_name("page.md")
EXPERTS = 5  # per layer in the table of tokens
MIN_LOAD = 0.1  # of the mean load, for an expert in that table: fewer tokens differ from the text's by chance
TOKENS = 6  # per expert
LONGEST = 20  # characters of a token
LITERAL = str.maketrans({"*": "∗", "`": "ˋ"})  # the page would take them for bold and code


def build_page(found: Described) -> list[Block]:
    """Blocks of the page; the section on agreement only where two models were compared."""
    values = found | {"n_layer": len(found["layers"]), "n_expert": len(found["layers"][0]["loads"])}
    values["mean"] = f", {found['mean']}" if found["mean"] else ""
    values |= {"MIN_COUNT": MIN_COUNT, "EXPERTS": EXPERTS, "MIN_LOAD": MIN_LOAD}
    tables = {"{summary}": build_summary, "{tokens}": build_token_table, "{agreement}": build_agreement}
    text = TEMPLATE.read_text(encoding="utf-8").strip()
    if "agreement" not in found:
        text, _, _ = text.partition("\n\n## Agreement")
    blocks: list[Block] = []
    for part in text.split("\n\n"):
        if part in tables:
            blocks.append(tables[part](found))
            continue
        words = " ".join(part.split()).format_map(values)
        if part.startswith("#"):
            blocks.append((f"h{part.count('#')}", words.lstrip("# ")))
        elif part.startswith("- "):
            blocks.append(("list", words.removeprefix("- ").split(" - ")))
        elif part.startswith("!["):
            caption, _, name = words[2:-1].partition("](")
            blocks.append(("picture", name, caption))
        else:
            blocks.append(("p", words))
    return blocks


def build_summary(found: Described) -> Block:
    """The table of one line per layer."""
    head = ["layer", "busiest", "idle", "in use", "per token", "nats", "zero gates", "sum", "norm"]
    rows = []
    for layer in found["layers"]:
        row = [f"{layer['layer']}", f"{layer['load_imbalance']:.2f}", f"{layer['dead_experts']}"]
        row += [f"{exp(layer['load_entropy']):.1f}", f"{exp(layer['entropy']):.1f}", f"{layer['entropy']:.3f}"]
        row += [f"{layer['zero_gates']:.2%}"]
        for q in (layer["gate_sum"], layer["gate_norm"]):
            row.append(f"{q['0.5']:.3g} [{q['0.05']:.3g}, {q['0.95']:.3g}]")
        row += [_with_chance(layer, key) for key in ("vocabulary", "strongest_partner")]
        rows.append(row)
    return "table", [*head, "vocabulary", "partner"], rows


def _with_chance(layer: Described, key: str) -> str:
    return f"{layer[key]:.0%} ({layer[f'{key}_by_chance']:.0%})"


def build_token_table(found: Described) -> Block:
    """The table of the experts whose tokens differ most from the text's."""
    rows = []
    for layer in found["layers"]:
        loads, mean = layer["loads"], sum(layer["loads"]) / len(layer["loads"])
        beyond = {e: one["nats"] - one["nats_by_chance"] for e, one in enumerate(layer["experts"])}
        for e in sorted((e for e in beyond if loads[e] >= MIN_LOAD * mean), key=lambda e: -beyond[e])[:EXPERTS]:
            tokens = layer["experts"][e]["tokens"][:TOKENS]
            cells = [f"{format_token(t).translate(LITERAL)} {t['share']:.0%} {t['lift']:.1f}×" for t in tokens]
            cells += [""] * (TOKENS - len(cells))
            rows.append([f"{layer['layer']}, {e}", f"{loads[e] / mean:.2f}", f"{beyond[e]:.2f}", *cells])
    return "table", ["layer, expert", "load / mean", "nats", "tokens", *[""] * (TOKENS - 1)], rows


def format_token(token: Described) -> str:
    """A token's text in quotes as Python writes it, cut at LONGEST characters; #id if not a complete character."""
    text = token["text"]
    return f"#{token['id']}" if "\ufffd" in text else repr(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def build_agreement(found: Described) -> Block:
    """The table of how far two models agree, one line per layer."""
    rows = []
    for layer in found["agreement"]:
        chance = layer["matched_by_chance"]
        beyond = f"{(layer['matched'] - chance) / (1 - chance):.2f}" if chance < 1 else "-"
        rows.append([f"{layer['layer']}", _with_chance(layer, "same_number"), _with_chance(layer, "matched"), beyond])
    return "table", ["layer", "same number", "matched", "beyond chance"], rows
