"""scripts/draw.py: the picture of a routing.json; scripts/report/style.py."""

import json

import pytest

from router import ROUTERS
from scripts import draw
from scripts.report.style import STYLES, style


def test_loads_are_relative_to_the_layer(tmp_path, capsys):
    layers = [{"layer": 1, "loads": [30, 20, 6, 0]}, {"layer": 2, "loads": [28, 28, 28, 28]}]
    report = {"run": "kern", "step": 1000, "layers": layers}
    axes = draw.plot_loads(report).axes[0]
    shares = axes.images[0].get_array()
    assert shares[0].tolist() == pytest.approx([30 / 14, 20 / 14, 6 / 14, 0]) and shares[1].tolist() == [1] * 4
    assert axes.lines[0].get_xydata().tolist() == [[3, 0]]  # the expert without a token
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2"]
    (tmp_path / "file.json").write_text(json.dumps(report))
    assert draw.main([str(tmp_path / "file.json")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "loads.png") and (tmp_path / "loads.png").exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"layers": 1}', "\x00"])
def test_another_file_is_refused(tmp_path, capsys, content):
    (tmp_path / "file.json").write_text(content)
    assert draw.main([str(tmp_path / "file.json")]) == 2
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
