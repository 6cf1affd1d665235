"""The picture of a request: lanes and their idle time, the plans above them, what it says in words, and how large it gets."""
import random
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legacy import figure
from legacy.figure import LEFT, RIGHT, WIDTH, Cells, MiniBatches, Pointers, Tree, of, picture
from legacy.timeline import LANES, Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*spans) -> Timeline:
    """A timeline of (lane, label, start, end), in milliseconds since it began."""
    timeline = Timeline()
    timeline.spans = [Span(lane, label, start / 1e3, end / 1e3) for lane, label, start, end in spans]
    return timeline


class Picture:
    """A parsed picture; everything in it lies inside of it."""
    def __init__(self, timeline, plan=None, title=""):
        self.source = picture(timeline, plan, title)
        self.root = ET.fromstring(self.source)
        wide, high = int(self.root.get("width")), int(self.root.get("height"))
        assert self.root.get("viewBox") == f"0 0 {wide} {high}" and wide == WIDTH and self.root.get("role") == "img"
        self.rects = [(rect.get("class"), rect.findtext(f"{SVG}title") or "", *(
            float(rect.get(name)) for name in ("x", "y", "width", "height"))) for rect in self.root.findall(f"{SVG}rect")[1:]]
        for _, _, x, y, width, height in self.rects:
            assert 0 <= x and width > 0 and x + width <= wide + 0.01 and 0 <= y and height > 0 and y + height <= high + 0.01
        self.texts = [text.text for text in self.root.findall(f"{SVG}text")]
        for text in self.root.findall(f"{SVG}text"):
            assert 0 <= float(text.get("x")) <= wide and 0 < float(text.get("y")) <= high
        self.title, self.desc = self.root.findtext(f"{SVG}title"), self.root.findtext(f"{SVG}desc")

    def of(self, name: str) -> list:
        """The rectangles of a color that say what they are."""
        return [rect for rect in self.rects if rect[0].split()[0] == name and rect[1]]


def ms(tooltip: str) -> tuple[float, float]:
    """The ends in a tooltip."""
    return tuple(map(float, re.search(r": ([\d.]+) to ([\d.]+) ms", tooltip).groups()))


RESTORED = drawn(
    ("storage", "layer 0", 0, 10), ("storage", "layer 1", 10, 20), ("load", "layer 0", 10, 15), ("load", "layer 1", 20, 25),
    ("compute", "H layer 0", 15, 20), ("compute", "K layer 1", 25, 30), ("compute", "prefill 64", 30, 48),
    ("compute", "decode", 50, 58), ("compute", "decode", 60, 70), ("save", "layer 0", 60, 64))


# 1. The lanes ----------------------------------------------------------------------------------------------------

def test_the_lanes_have_their_order_and_their_spans_to_scale():
    shown = Picture(RESTORED)
    assert [words for words in shown.texts if words in LANES] == list(LANES)
    tops = {lane: {rect[3] for rect in shown.of(lane)} for lane in LANES}
    assert all(len(top) == 1 for top in tops.values())
    assert sorted(tops, key=lambda lane: min(tops[lane])) == list(LANES)
    for lane in LANES:
        spans = [span for span in RESTORED.spans if span.lane == lane]
        assert [rect[1].split(":")[0] for rect in shown.of(lane)] == [span.label for span in spans]
        for (_, tip, x, _, width, _), span in zip(shown.of(lane), spans):
            assert x == pytest.approx(LEFT + span.start / RESTORED.end * (RIGHT - LEFT), abs=0.02)
            assert width == pytest.approx((span.end - span.start) / RESTORED.end * (RIGHT - LEFT), abs=0.02)
            assert ms(tip) == pytest.approx((span.start * 1e3, span.end * 1e3), abs=0.01)


def test_a_rectangle_says_what_fits_into_it():
    texts = Picture(RESTORED).texts
    assert {"0", "1", "H0", "K1", "prefill 64", "decode"} <= set(texts) and "layer 0" not in texts
    texts = Picture(drawn(("load", "chunk 12", 0, 100), ("compute", "chunk 34", 0, 1), ("save", "store kv", 0, 6),
                          ("storage", "write 8 pages", 0, 2.5))).texts
    assert "12" in texts and "34" not in texts and "store" in texts and "store kv" not in texts and "w" in texts


@pytest.mark.parametrize("end,expected", [
    (70, "0 10 20 30 40 50 60 70"), (79.9, "0 10 20 30 40 50 60 70"), (81, "0 20 40 60 80"), (1, "0.0 0.2 0.4 0.6 0.8 1.0"),
    (0.033, "0.000 0.005 0.010 0.015 0.020 0.025 0.030"), (123456, "0 20000 40000 60000 80000 100000 120000"),
    (8, "0 1 2 3 4 5 6 7 8"),
])
def test_the_ticks_of_the_axis_are_round(end, expected):
    texts = Picture(drawn(("save", "x", 0, end))).texts
    assert [words for words in texts if re.match(r"\d", words)] == [*expected.split()[:-1], expected.split()[-1] + " ms"]


def test_idle_time_before_the_first_token_is_hatched_and_said():
    shown = Picture(RESTORED)
    assert [rect[1] for rect in shown.of("idle")] == ["idle 15 ms", "idle 5 ms", "idle 2 ms",                     # compute
                                                      "idle 10 ms", "idle 5 ms", "idle 25 ms", "idle 30 ms"]      # load, storage
    assert max(rect[2] + rect[4] for rect in shown.of("idle")) == pytest.approx(LEFT + 50 / 70 * (RIGHT - LEFT), abs=0.02)
    assert [words for words in shown.texts if words.startswith("idle ")] == [
        "idle 44%", "idle 80%", "idle 60%", "idle before the first token"]
    assert "first token" in shown.texts
    assert shown.desc == ("Who was busy when, in 70.0 ms: compute, load, save, storage. Before the first token, after 50.0 ms: "
                          "compute idle 44%, load idle 80%, storage idle 60%")


@pytest.mark.parametrize("gap,expected", [(1, ["idle 1 ms"]), (0.5, [])])
def test_idle_time_that_can_be_seen_is_hatched(gap, expected):
    shown = Picture(drawn(("load", "layer 0", 0, 500), ("load", "layer 1", 500 + gap, 1000)))
    assert [rect[1] for rect in shown.of("idle")] == expected


def test_without_decoding_the_idle_time_ends_with_what_computes_or_brings():
    shown = Picture(drawn(("load", "layer 0", 0, 2), ("compute", "layer 0", 2, 8), ("save", "layer 0", 8, 20)))
    assert [rect[1] for rect in shown.of("idle")] == ["idle 2 ms", "idle 6 ms"]
    assert [rect[4] for rect in shown.of("idle")] == pytest.approx([(RIGHT - LEFT) * 0.1, (RIGHT - LEFT) * 0.3], abs=0.02)
    assert "idle 25%" in shown.texts and "first token" not in shown.texts and "idle" in shown.texts
    assert "Until the end, after 8.0 ms: compute idle 25%, load idle 75%" in shown.desc


@st.composite
def some_spans(draw):
    labels = st.sampled_from(["decode", "layer 3", "R layer 12", "chunk 7", "prefill 64", "<&>\x00\"'"]) | st.text(max_size=6)
    starts, lengths = st.floats(0, 5000, allow_subnormal=False), st.sampled_from([0.0, 1e-6, 0.5]) | st.floats(0, 5000)
    return [(lane, label, start, start + length) for lane, label, start, length in draw(
        st.lists(st.tuples(st.sampled_from(LANES), labels, starts, lengths), min_size=1, max_size=12))]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(some_spans(), st.text(max_size=200))
def test_whatever_happened_can_be_drawn(spans, title):
    timeline = drawn(*spans)
    shown = Picture(timeline, None, title)                          # which looks at whether every rectangle lies inside
    decodes = [span.start for span in timeline.spans if span.label == "decode"]
    end = min(decodes) if decodes else max((span.end for span in timeline.spans if span.lane != "save"), default=0)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in timeline.spans)]
    assert [words for words in shown.texts if re.fullmatch(r"idle \d+%", words)] == [
        f"idle {timeline.bubble(lane, 0, end):.0%}" for lane in lanes if lane != "save"]
    assert ("first token" in shown.texts) == bool(decodes)
    scale, drawings = (RIGHT - LEFT) / (timeline.end or 1), [rect for lane in LANES for rect in shown.of(lane)]
    assert all(LEFT <= rect[2] and rect[2] + rect[4] <= RIGHT + 0.02 for rect in drawings)
    for span in timeline.spans:                                     # some rectangle of its lane covers it
        start, until = LEFT + span.start * scale, LEFT + span.end * scale
        assert any(name.split()[0] == span.lane and x <= start + 0.7 and x + width >= until - 0.7
                   for name, _, x, _, width, _ in drawings), span
    idle = sum(rect[4] for rect in shown.of("idle")) / scale        # hatched is what is idle, but for what is too short
    expected = sum(timeline.bubble(lane, 0, end) for lane in lanes if lane != "save") * end
    assert expected - (len(spans) + 4) * 0.6 / scale <= idle <= expected + 0.1 * (len(spans) + 4) / scale
    assert picture(timeline, None, title) == shown.source


def test_of_nothing_there_is_a_picture_too():
    shown = Picture(Timeline(), None, "Nothing")
    assert shown.rects == [] and "(nothing happened)" in shown.texts and shown.desc == "(nothing happened)"


def test_labels_and_titles_are_escaped():
    bad = '<script>alert("1")</script> & \'more\' \x00\x1b\ud800'
    shown = Picture(drawn(("save", bad, 0, 1)), Cells(bad, [(bad, [("R", bad)])], {"R": bad}), bad)
    assert "<script" not in shown.source and shown.title == bad[:-3] + "\ufffd" * 3
    assert shown.of("save")[0][1].startswith('<script>alert("1")</script> & \'more\'')
    shown.source.encode()


# 2. Many spans ---------------------------------------------------------------------------------------------------

def test_neighbours_that_are_too_small_are_one_rectangle_that_says_so():
    shown = Picture(drawn(("load", "layer 0", 0, 500), *(("compute", "decode", 500 + at, 501 + at) for at in range(57)),
                          ("compute", "decode", 800, 1000)))
    first, second = shown.of("compute")
    assert first[1] == "decode, 57 of them: 500.00 to 557.00 ms" and second[1] == "decode: 800.00 to 1000.00 ms"
    assert first[2] == pytest.approx(LEFT + 310, abs=0.02) and first[4] == pytest.approx(57 * 0.62, abs=0.02)
    assert len(shown.of("load")) == 1 and first[5] == second[5] and not any("lower bar" in words for words in shown.texts)


@pytest.mark.parametrize("spans,expected", [
    ([("layer 0", 0, 100), ("layer 1", 100, 200), ("layer 2", 200, 1000)], 3),                  # wide ones have a name each
    ([("layer 0", 0, 1), ("layer 1", 1, 2), ("prefill 3", 2, 3), ("x", 999, 1000)], 3),         # of one kind
    ([("decode", 0, 1), ("decode", 2, 3), ("x", 999, 1000)], 3),                                # 0.6 px apart
    ([("decode", 0, 1), ("decode", 1.4, 3), ("x", 999, 1000)], 2),                              # 0.25 px apart
    ([("forward", 0, 0.5), ("rebuild", 0.5, 1), ("forward", 1, 1.5), ("x", 999, 1000)], 2),     # too small even for their kind
], ids=str)
def test_what_can_be_told_apart_is_drawn_apart(spans, expected):
    assert len(Picture(drawn(*(("compute", *span) for span in spans))).of("compute")) == expected


def test_what_is_drawn_as_one_is_as_high_as_it_was_busy():
    shown = Picture(drawn(*(("compute", "decode", at, at + 0.25) for at in range(10000)), ("load", "x", 0, 10000)))
    compute, load = shown.of("compute") + shown.of("load")
    assert compute[1] == "decode, 10000 of them: 0.00 to 9999.25 ms, busy 25% of it"
    assert compute[5] == pytest.approx(load[5] / 4, rel=0.01)
    assert any("lower bar" in words for words in shown.texts)


@pytest.mark.parametrize("gap", [0, 0.3, 0.9])
def test_thousands_of_spans_make_a_small_file(gap):
    chance = random.Random(1)
    spans = [(lane, chance.choice(["decode", "layer 1", "chunk 2", "rebuild"]), at, at + chance.random() * (1 - gap))
             for lane in LANES for at in range(5000)]
    assert len(picture(drawn(*spans)).encode()) < 200_000


# 3. In words, and in colors that can be read -------------------------------------------------------------------------

def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    def luminance(color):
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
                            for part in (int(digits[at:at + 2], 16) / 255 for at in (0, 2, 4)))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_all_text_can_be_read_on_a_light_page_and_on_a_dark_one():
    schemes = re.findall(r"svg\{(--[^}]*)\}", Picture(RESTORED).root.findtext(f"{SVG}style"))
    assert len(schemes) == 2
    for scheme in schemes:
        colors = dict(re.findall(r"--(\w+):(#\w+)", scheme))
        assert set(figure.COLORS) | {"page", "ink", "soft", "line"} == set(colors)
        for name in {*colors} - {"page", "line"}:                   # letters on a color have the page's
            assert contrast(colors[name], colors["page"]) >= 4.5, name
    assert contrast("#fff", "#000000") == pytest.approx(21)


def test_letters_in_rectangles_have_the_color_of_the_page():
    assert ".on{fill:var(--page)" in picture(RESTORED) and "@media(prefers-color-scheme:dark)" in picture(RESTORED)
    root = Picture(RESTORED).root
    assert {text.get("class") for text in root.findall(f"{SVG}text") if text.text in ("0", "H0", "K1")} == {"on mid", "mid"}


def test_nothing_is_loaded_from_elsewhere():
    source = picture(RESTORED, CELLS, "A title").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|href|<script|<image", source) and set(re.findall(r"url\(([^)]*)\)", source)) <= {
        f"#{name}" for name in (*figure.TEXTURES, "idle")}


# 4. The plans ----------------------------------------------------------------------------------------------------

CELLS = Cells("How each layer came back", [(f"layer {row}", [("R" if row < 2 else "H", f"chunk {at}") for at in range(6)] + [
    ("k", "chunk 6")]) for row in range(4)], dict(R="recomputed", H="projected", K="loaded", k="loaded in part"))
POINTERS = Pointers("Who brings what", 31, [(at, at * 1e-3, (at + 1) * 1e-3) for at in range(16)],
                    [(30 - at, at * 1e-3, (at + 2) * 1e-3) for at in range(15)])
TREE = Tree("The tree", [(0, 4, 9, ("L1", "L2"), True), (1, 12, 1, ("L2", "L3"), True), (1, 1, 0, (), False)],
            dict(L1="device", L2="host memory", L3="storage"))
BATCHES = MiniBatches("The mini-batches", [(5, 8, 12, 20, 0.004, 0.0043), (1, 0, 10, 22, 0.002, 0.002)])


@pytest.mark.parametrize("plan", [CELLS, POINTERS, TREE, BATCHES], ids=lambda plan: type(plan).__name__)
def test_a_plan_is_above_the_lanes_with_its_title_and_in_words(plan):
    bare, shown = Picture(RESTORED, None, "T"), Picture(RESTORED, plan, "T")
    assert shown.texts[:2] == ["T", plan.title] and shown.title == "T"
    assert shown.desc == f"{plan.title}. {plan.words()}. {bare.desc}"
    below = min(rect[3] for rect in shown.rects if rect[0] == "lane" and rect[5] < 100)
    added = len(shown.rects) - len(bare.rects)
    assert added > 3 and sum(rect[3] + rect[5] <= below for rect in shown.rects) == added
    assert [rect[:3] + rect[4:] for rect in shown.rects[added:]] == [rect[:3] + rect[4:] for rect in bare.rects]
    assert Picture(Timeline(), plan).texts[0] == plan.title


@pytest.mark.parametrize("plan", [Cells("t", [], {}), Cells("t", [("", [])], {"R": "recomputed"}), Pointers("t", 0, [], []),
                                  Pointers("t", 3, [(0, 0.0, 0.01)], []), Tree("t", []), MiniBatches("t", []),
                                  MiniBatches("t", [(0, 0, 0, 0, 0.0, 0.0)])], ids=str)
def test_a_plan_of_little_can_be_drawn(plan):
    assert "t" in Picture(RESTORED, plan).texts


def test_cells_have_their_letter_and_a_legend_of_what_occurs():
    shown = Picture(Timeline(), CELLS)
    assert [rect[0] for rect in shown.rects if rect[1]] == (["compute"] * 6 + ["load"]) * 2 + (["hidden"] * 6 + ["load"]) * 2
    letters = [words for words in shown.texts if words in "RHKk"]
    assert [letters.count(letter) for letter in "RHKk"] == [13, 13, 0, 5]                       # each once in the legend
    assert "recomputed" in shown.texts and "loaded in part" in shown.texts and "loaded" not in shown.texts
    assert CELLS.words() == ("layer 0 to layer 1: 6 R, 1 k; layer 2 to layer 3: 6 H, 1 k; R: recomputed, H: projected, "
                             "K: loaded, k: loaded in part")


def test_a_kind_without_a_color_of_its_own_can_be_drawn():
    assert [rect[0] for rect in Picture(Timeline(), Cells("t", [("", [("?", "what")])], {})).rects] == ["other"]


def test_cells_that_are_too_small_are_drawn_in_runs_with_a_texture_for_each_kind():
    rows = [(f"layer {row}", [("RHK"[(row > 20) + (row > 60)] if at < 250 else "B", f"chunk {at}") for at in range(256)])
            for row in range(80)]
    shown = Picture(Timeline(), Cells("Layers and chunks", rows, dict(R="recomputed", H="projected", K="loaded", B="both")))
    cells = [rect for rect in shown.rects if rect[1]]
    assert len(cells) == 160 and cells[0][1] == "chunk 0 to chunk 249: 250" and cells[1][1] == "chunk 250 to chunk 255: 6"
    assert {rect[0] for rect in cells} == {"compute t", "hidden t", "load t", "other t"} and int(shown.root.get("height")) < 500
    assert 4 < sum(words.startswith("layer ") for words in shown.texts) < 20
    swatches = [rect[0] for rect in shown.rects if not rect[1]]                                 # the legend shows both
    assert swatches == [name for kind in ("compute", "hidden", "load", "other") for name in (kind, kind + " t")]


def test_of_a_long_prompt_a_run_of_blocks_has_its_letter_and_says_how_many_they_are():
    cells = [("g", "on the device")] * 500 + [("m", "computed")] * 3
    shown = Picture(Timeline(), Cells("t", [("", cells)], dict(g="found", m="new")))
    assert [rect[:2] for rect in shown.rects if rect[1]] == [("device", "on the device: 500"), ("compute t", "computed: 3")]
    assert "g 500" in shown.texts and shown.texts.count("g") == shown.texts.count("m") == 1     # which are in the legend


def test_cells_without_any_order_make_a_file_of_bearable_size():
    chance = random.Random(1)
    rows = [(f"layer {row}", [(chance.choice("RHK"), f"chunk {at}") for at in range(256)]) for row in range(80)]
    shown = Picture(RESTORED, Cells("Noise", rows, dict(R="recomputed", H="projected", K="loaded")))
    assert len(shown.source) < 500_000
    tips = [path.findtext(f"{SVG}title") for path in shown.root.findall(f"{SVG}path") if path.get("class").endswith(" t")]
    assert len(tips) == 240
    for label, cells in rows:
        for kind, words in (("R", "recomputed"), ("H", "projected"), ("K", "loaded")):
            assert f"{label}: {sum(cell[0] == kind for cell in cells)} of 256 {words}" in tips


def test_pointers_climb_and_come_down_on_the_axis_of_the_lanes():
    timeline = drawn(*(("compute", f"chunk {at}", at, at + 1) for at in range(16)), ("load", "chunk 16", 15, 16),
                     ("compute", "decode", 16, 20))
    shown = Picture(timeline, POINTERS)
    plan = [rect for rect in shown.rects if "computed" in rect[1] or "loaded" in rect[1]]
    computed, loaded = plan[:16], plan[16:]
    lanes = [rect for rect in shown.of("compute") if rect[1].startswith("chunk") and "computed" not in rect[1]]
    assert [rect[2] for rect in computed] == pytest.approx([rect[2] for rect in lanes], abs=0.02)      # at the same time
    assert [rect[3] for rect in computed] == sorted((rect[3] for rect in computed), reverse=True)
    assert [rect[3] for rect in loaded] == sorted(rect[3] for rect in loaded) and loaded[-1][3] < computed[-1][3]
    assert all(rect[0] == "load t" for rect in loaded) and loaded[0][1] == "chunk 30 loaded: 0.00 to 2.00 ms"
    assert "They meet at chunk 16 of 31" in shown.texts and {"chunk 0", "chunk 30"} <= set(shown.texts)
    circle, = shown.root.findall(f"{SVG}circle")
    assert float(circle.get("cx")) == pytest.approx(LEFT + 16 / 20 * (RIGHT - LEFT), abs=0.02)
    assert loaded[-1][3] + loaded[-1][5] <= float(circle.get("cy")) <= computed[-1][3]
    assert "16 computed from the front, 15 loaded from the back. They meet at chunk 16 of 31" in shown.desc


@pytest.mark.parametrize("computed,loaded,expected", [
    ([(0, 0, 1), (0, 1, 2)], [], "nothing is loaded"), ([], [(2, 0, 1)], "nothing is computed"),
    ([], [], "nothing is to be done")])
def test_pointers_that_do_not_meet_say_so(computed, loaded, expected):
    shown = Picture(RESTORED, Pointers("t", 3, computed, loaded))
    assert shown.root.find(f"{SVG}circle") is None and expected in shown.desc
    assert f"{min(len(computed), 1)} computed from the front" in shown.desc                            # in two parts


def test_a_tree_is_an_indented_list_with_a_box_for_each_tier():
    shown = Picture(Timeline(), TREE)
    root, first, second = (next(rect for rect in shown.rects if rect[1].startswith(pages)) for pages in ("4 ", "12 ", "1 "))
    assert root[2] < first[2] == second[2] and root[3] < first[3] < second[3] and second[4] < root[4] < first[4]
    assert (root[0], first[0], second[0]) == ("compute", "compute", "other")
    assert [words for words in shown.texts if "page" in words] == ["4 pages, 9 hits, on the path", "12 pages, 1 hit, on the path",
                                                                   "1 page, 0 hits"]
    assert [rect[1] for rect in shown.rects if "held" in rect[1]] == [f"held in {tier}" for tier in ("L1", "L2", "L2", "L3")]
    assert sum(path.get("class") == "mark" for path in shown.root.findall(f"{SVG}path")) == 2          # thick outlines
    assert {"device", "host memory", "storage"} <= set(shown.texts) and "in no tier" in shown.desc


def test_of_a_large_tree_the_first_forty_nodes_are_drawn():
    shown = Picture(RESTORED, Tree("t", [(at, 1, 0, ("L1",), False) for at in range(45)]))
    assert "and 5 more" in shown.texts and shown.desc.count("depth") == 40 and "and 5 more" in shown.desc
    assert sum("1 page, 0 hits" == words for words in shown.texts) == 40


def test_of_a_large_tree_the_path_is_drawn_wherever_it_stands():
    nodes = [(0, 1, 0, ("L1",), False)] * 45 + [(0, 7, 3, ("L2",), True), (1, 2, 3, (), True)] + [(0, 1, 0, ("L1",), False)] * 3
    shown = Picture(RESTORED, Tree("t", nodes))
    assert "and 10 more" in shown.texts and shown.desc.count("depth") == 40 and "and 10 more" in shown.desc
    assert shown.desc.count("on the path") == 2 and sum("on the path" in words for words in shown.texts) == 2


def test_mini_batches_show_their_blocks_and_whether_they_are_balanced():
    shown = Picture(Timeline(), BATCHES)
    blocks = [(rect[0], rect[1], rect[4]) for rect in shown.rects if "K and V" in rect[1] or "activations" in rect[1]]
    assert [(name, tip.split(":")[0]) for name, tip, _ in blocks] == [
        ("device", "8"), ("hidden", "12"), ("load", "20"), ("hidden", "10"), ("load", "22")]
    assert (blocks[1][2] + 1) / (blocks[0][2] + 1) == pytest.approx(12 / 8, rel=0.01)
    link, processor, *equal = (rect[4] for rect in shown.rects if "ms" in rect[1])
    assert processor / link == pytest.approx(4.3 / 4, rel=0.01) and equal[0] == equal[1] == pytest.approx(link / 2, rel=0.01)
    assert {"5 requests", "1 request", "A 8, H 12, K 20", "A 0, H 10, K 22", "link 4.00 ms"} <= set(shown.texts)
    assert "and 3 more" in Picture(RESTORED, MiniBatches("t", BATCHES.batches * 7 + BATCHES.batches[:1])).desc


def test_a_timeline_is_drawn_with_the_plan_that_goes_with_it():
    timeline = drawn(("load", "layer 0", 0, 2))
    assert timeline.plan is None and of(timeline, "T") == picture(timeline, None, "T")
    timeline.plan = lambda: None
    assert of(timeline) == picture(timeline)
    timeline.plan = lambda: TREE
    assert of(timeline, "T") == picture(timeline, TREE, "T")
