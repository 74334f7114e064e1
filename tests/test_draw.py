"""scripts/draw.py: the page and pictures of a routing.json."""

import json

import pytest

from router import ROUTERS
from scripts import draw
from scripts.report.style import STYLES, style

PARTS = {"vocabulary": 0.5, "vocabulary_by_chance": 0.25, "strongest_partner": 0.6, "strongest_partner_by_chance": 0.3}
PARTS |= {"same_number": 0.5, "same_number_by_chance": 0.25, "matched": 0.7, "matched_by_chance": 0.4}


def make_layer(number, loads, tokens=()):
    """A layer's entry of routing.json."""
    experts = [{"nats": 1.0 - 0.1 * e, "nats_by_chance": 0.25, "tokens": [*tokens]} for e in range(len(loads))]
    layer = {"layer": number, "loads": loads, "load_imbalance": 1.5, "dead_experts": loads.count(0), "entropy": 1.0}
    layer |= {"load_entropy": 1.0, "zero_gates": 0.25, "experts": experts}
    return layer | PARTS


@pytest.fixture
def report():
    tokens = [{"id": 42, "text": text, "share": 0.5, "lift": 2.0} for text in (" **", "\n\t", "x" * 30, "`é")]
    layers = [make_layer(1, [30, 20, 6, 0], tokens), make_layer(2, [28, 28, 28, 28])]
    layers[1] |= {"matched": 1.0, "matched_by_chance": 1.0}
    about = {"run": "kern", "checkpoint": "step_00001000", "step": 1000, "average": 1, "mean": "", "router": "kern"}
    about |= {"top_k": 2, "data": "data/<b>", "windows": 6, "tokens": 28, "min_count": 10, "layers": layers}
    return about | {"other": "kern, step_00000500", "agreement": layers}


def draw_file(tmp_path, content):
    (tmp_path / "file.json").write_text(json.dumps(content))
    return draw.main([str(tmp_path / "file.json")])


def test_page_of_a_routing_report(report, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.report.style.DPI", 30)
    assert draw_file(tmp_path, report) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "routing.md"), str(tmp_path / "routing.html")]
    text = (tmp_path / "routing.md").read_text()
    assert text.startswith("# Routing of kern at step 1,000\n") and "{" not in text and "&lt;b>" in text
    assert "2 layers of 4 experts, 2 per token; 6 validation windows" in text and "28 tokens" in text
    assert "| 1 | 1.50 | 1 | 2.7 | 2.7 | 25.00% | 50% (25%) | 60% (30%) |" in text
    assert "| 1, 1 | 1.43 | 0.65 | ' ∗∗' 50% 2.0× |" in text
    assert all(f"| {token} 50% 2.0× |" in text for token in (r"'\n\t'", "'" + "x" * 19 + "…'", "'ˋé'"))
    assert "| 1, 2 |" in text and "| 1, 3 |" not in text  # an expert with less than a tenth of the mean load
    assert "## Agreement with kern, step_00000500" in text
    assert "| 1 | 50% (25%) | 70% (40%) | 0.50 |" in text and "| 2 | 50% (25%) | 100% (100%) | - |" in text
    assert "(loads.png)" in text
    assert (tmp_path / "routing.html").read_text().count("data:image/png") == 1


def test_loads_are_relative_to_the_layer(report):
    axes = draw.plot_loads(report).axes[0]
    shares = axes.images[0].get_array()
    assert shares[0].tolist() == pytest.approx([30 / 14, 20 / 14, 6 / 14, 0]) and shares[1].tolist() == [1] * 4
    assert axes.lines[0].get_xydata().tolist() == [[3, 0]]  # the expert without a token
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize("content", [[], {}, {"run": 1}])
def test_another_file_is_refused(tmp_path, capsys, content):
    assert draw_file(tmp_path, content) == 2
    assert "not written by eval.routing" in capsys.readouterr().err
    assert draw.main([str(tmp_path / "none.json")]) == 2


def test_every_router_has_a_style_of_its_own(monkeypatch):
    assert set(STYLES) == set(ROUTERS)
    markers = [marker for _, _, marker in STYLES.values()]
    assert len(set(markers)) == len(markers)  # readable in black and white
    monkeypatch.setitem(ROUTERS, "someone's", None)
    monkeypatch.setitem(ROUTERS, "another's", None)
    looks = [repr(style(name)) for name in [*ROUTERS, "removed"]]
    assert len(set(looks)) == len(looks)
