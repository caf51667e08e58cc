"""The templates as a user meets them: found in the template browser, opened, run; in both of ComfyUI's renderers."""

import re
from contextlib import contextmanager, suppress

import pytest

from support import workflows_saved
from support.frontend import open_frontend, posting, settle
from support.node_results import node_results, show_results
from support.server import ExecutionFailed, ExecutionInterrupted
from support.workflows_saved import BLUEPRINTS, MODEL_FOLDERS, OLD_WORKFLOWS, TEMPLATES, read, subgraphs

RENDERERS = {"classic": False, "Vue": True}
# What ComfyUI itself asks for in vain, and says on the console, when it starts with an empty user folder.
NOT_FOUND = re.compile(r"/user\.css$|/api/userdata\?dir=|/api/userdata/(user\.css|comfy\.templates\.json)$")
SAID_AT_START = re.compile(r"Failed to load resource: .* 404|ComfyApp graph accessed before initialization")
# What newer frontends say of inputs that grow with their links. The server takes the prompt, as a test here sees.
SAID_OF_GROWING_INPUTS = re.compile("Failed to realign input link slots .*occupied-target")
TITLE_HEIGHT = 30
MARK_HEIGHT = 40  # the line below a node whose model file is missing
MOST_WIDTH, MOST_HEIGHT = 1900, 1000


@pytest.fixture(scope="module", autouse=True)
def model_files(server):
    with workflows_saved.stand_ins(server, map(read, (*TEMPLATES, *OLD_WORKFLOWS))):
        yield


@pytest.fixture(params=RENDERERS, scope="module")
def page(request, browser, server):
    """The frontend with one of its renderers, for all tests: to load it takes longer than most of them."""
    vue = RENDERERS[request.param]
    with open_frontend(browser, server.url) as opened:
        opened.evaluate("vue => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', vue)", vue)
        opened.wait_for_function("vue => LiteGraph.vueNodesMode === vue", arg=vue)
        yield opened


@contextmanager
def nothing_wrong(page):
    """Fails at the end if the page said an error, or asked for something that is not there."""
    wrong = []
    listeners = {
        "console": lambda message: wrong.append(message.text) if message.type == "error" else None,
        "response": lambda response: wrong.append(response.url) if response.status >= 400 else None,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    known = (NOT_FOUND, SAID_AT_START, SAID_OF_GROWING_INPUTS)
    assert not [what for what in wrong if not any(pattern.search(what) for pattern in known)]


def browse(page):
    """Open the template browser at this pack's templates."""
    page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_role("dialog").get_by_role("button", name="int8_dit").click()


def open_template(page, name):
    """Click a template in the template browser. It opens as an app, without the graph."""
    page.evaluate("app.graph.clear()")
    browse(page)
    page.get_by_test_id(f"template-workflow-{name}").click()
    page.wait_for_function("count => app.graph.nodes.length === count", arg=_count(name))
    page.get_by_test_id("linear-run-button").wait_for()
    # Neither the template browser nor a complaint stays. Newer frontends offer a tour of their first app.
    page.wait_for_function(
        """() => {
            const dialogs = [...document.querySelectorAll("[role=dialog]")];
            dialogs.find(({ innerText }) => innerText.includes("Start tutorial"))?.querySelector("button").click();
            return !dialogs.length;
        }"""
    )


def show_graph(page):
    page.evaluate("app.extensionManager.command.execute('Comfy.ToggleLinear')")
    page.wait_for_function("app.canvas.canvas.clientWidth > 0")
    settle(page)  # nodes get their size in the frames after


def _count(name):
    (path,) = (path for path in TEMPLATES if path.stem == name)
    return len(read(path)["nodes"])


def test_all_are_listed_with_their_thumbnails(page):
    with nothing_wrong(page):
        browse(page)
        for path in TEMPLATES:
            card = page.get_by_test_id(f"template-workflow-{path.stem}")
            card.scroll_into_view_if_needed()
            assert path.stem in card.inner_text()
            page.wait_for_function("image => image.naturalWidth > 0", arg=card.locator("img").first.element_handle())
        page.keyboard.press("Escape")
        page.wait_for_function("!document.querySelector('[role=dialog]')")


@pytest.fixture(scope="module")
def results(server):
    return node_results(server)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_it_opens_whole_and_has_room_for_results(page, server, results, path):
    with nothing_wrong(page):
        open_template(page, path.stem)
        workflow = read(path)
        assert_app_has_inputs(page, workflow)
        show_graph(page)
        assert_opened(page, workflow)
        assert_nothing_overlaps(page)
        assert_can_be_read(page)
        show_results(page, results)
        shown = sum(node["type"] in results and "images" not in results[node["type"]] for node in workflow["nodes"])
        page.wait_for_function("count => document.querySelectorAll('.int8-result').length >= count", arg=shown)
        settle(page)
        assert shown
        assert_nothing_overlaps(page)
    assert_accepted(page, server)


@pytest.mark.parametrize("path", OLD_WORKFLOWS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_a_workflow_of_an_earlier_version_opens_whole(page, server, path):
    workflow = read(path)
    with nothing_wrong(page):
        page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
        assert_opened(page, workflow)
    assert_accepted(page, server)


def assert_app_has_inputs(page, workflow):
    """The app has each input that the template names, by its label, and shows pictures of nodes that are there."""
    app, nodes = workflow["extra"]["linearData"], {str(node["id"]): node for node in workflow["nodes"]}
    labels = []
    for node, name in app["inputs"]:
        (widget,) = (one for one in nodes[node]["inputs"] if one["name"] == name)
        labels.append(widget.get("label", name))
    assert len(set(labels)) == len(labels) > 1
    page.wait_for_function("words => words.every((word) => document.body.innerText.includes(word))", arg=labels)
    assert {nodes[node]["type"] for node in app["outputs"]} <= {"SaveImage", "PreviewImage"} and app["outputs"]


def assert_accepted(page, server):
    """The server takes what the page would send: each node, input and value is one that today's nodes have. What runs
    is stopped: its models are stand-ins."""
    prompt_id = server.submit(page.evaluate("async () => (await app.graphToPrompt()).output"))
    server.interrupt()
    with suppress(ExecutionFailed, ExecutionInterrupted):
        server.wait(prompt_id)


def assert_opened(page, workflow):
    """Nothing is missing or marked, and what the frontend would save is what was opened.

    A link to an input that is gone would be missing from it, and a widget that a node lost would have shifted the
    values of the others. A newer node may have more widgets at the end.
    """
    nodes = page.evaluate(
        """() => {
            const all = (graph) => graph.nodes.flatMap((node) => [node, ...(node.subgraph ? all(node.subgraph) : [])]);
            return all(app.graph).map((node) => ({
                type: node.type,
                registered: node.isSubgraphNode?.() || node.type in LiteGraph.registered_node_types,
                errors: !!node.has_errors,
                combos: (node.widgets ?? []).filter((widget) => widget.type === "combo")
                    .map(({ name, value, options }) => ({ name, value, options: [...options.values] })),
            }));
        }"""
    )
    for node in nodes:
        assert node["registered"] and not node["errors"], node
        for combo in node["combos"]:
            assert combo["value"] in combo["options"], (node["type"], combo)
    saved = page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))")
    assert_same_nodes(workflow, saved)
    assert {_ends(*link) for link in saved["links"]} == {_ends(*link) for link in workflow["links"]}
    now = subgraphs(saved)
    for kind, subgraph in subgraphs(workflow).items():
        assert_same_nodes(subgraph, now[kind])
        assert {_ends(**link) for link in now[kind]["links"]} == {_ends(**link) for link in subgraph["links"]}


def _ends(id, origin_id, origin_slot, target_id, target_slot, type):
    """A link but for the place of the input: behind inputs that grow with their links frontends count differently."""
    return id, origin_id, origin_slot, target_id, type


def assert_same_nodes(before, after):
    now = {node["id"]: node for node in after["nodes"]}
    assert now.keys() == {node["id"] for node in before["nodes"]}
    for node in before["nodes"]:
        values = node.get("widgets_values") or []
        assert now[node["id"]]["type"] == node["type"]
        assert (now[node["id"]].get("widgets_values") or [])[: len(values)] == values


def assert_can_be_read(page):
    """The whole fits into the page at a zoom at which the frontend draws words: each node's title is among them."""
    left, top, right, bottom = page.evaluate(
        """(title) => {
            const boxes = app.graph.nodes.map(({ pos, size }) =>
                [pos[0], pos[1] - title, pos[0] + size[0], pos[1] + size[1]]);
            return [0, 1].map((i) => Math.min(...boxes.map((box) => box[i])))
                .concat([2, 3].map((i) => Math.max(...boxes.map((box) => box[i]))));
        }""",
        TITLE_HEIGHT,
    )
    assert right - left <= MOST_WIDTH and bottom - top <= MOST_HEIGHT
    seen = page.evaluate(
        """async (title) => {
            const { ds, canvas } = app.canvas;
            const [x, y] = ds.offset, words = [];
            const draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                words.push(text);
                return draw.call(this, text, ...at);
            };
            app.canvas.setDirty(true, true);
            for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
            CanvasRenderingContext2D.prototype.fillText = draw;
            words.push(...[...document.querySelectorAll("[data-node-id]")].map((node) => node.innerText));
            return {
                words: words.join(" "),
                titles: app.graph.nodes.map((node) => node.title),
                inside: app.graph.nodes.every(({ pos, size }) => pos[0] + x > 0 && pos[1] - title + y > 0
                    && (pos[0] + size[0] + x) * ds.scale < canvas.clientWidth
                    && (pos[1] + size[1] + y) * ds.scale < canvas.clientHeight),
            };
        }""",
        TITLE_HEIGHT,
    )
    assert seen["inside"]
    unread = [title for title in seen["titles"] if " ".join(title.split()) not in " ".join(seen["words"].split())]
    assert not unread


def assert_nothing_overlaps(page):
    """No node and no group lies on another, and a group holds each of its nodes whole, also those that are marked."""
    boxes = page.evaluate(
        """([title, mark, loaders]) => ({
            nodes: app.graph.nodes.map(({ title: name, type, pos, size, isSubgraphNode }) => ({
                name,
                box: [pos[0], pos[1] - title, pos[0] + size[0],
                    pos[1] + size[1] + (isSubgraphNode?.() || loaders.includes(type) ? mark : 0)],
            })),
            groups: app.graph.groups.map(({ title: name, pos, size }) =>
                ({ name, box: [pos[0], pos[1], pos[0] + size[0], pos[1] + size[1]] })),
        })""",
        [TITLE_HEIGHT, MARK_HEIGHT, list(MODEL_FOLDERS)],
    )
    nodes, groups = boxes["nodes"], boxes["groups"]
    for items in (nodes, groups):
        for index, first in enumerate(items):
            overlapped = [second["name"] for second in items[index + 1 :] if _overlap(first["box"], second["box"])]
            assert not overlapped, first["name"]
    for node in nodes:
        around = [group["box"] for group in groups if _overlap(node["box"], group["box"])]
        assert len(around) <= 1 and all(_inside(node["box"], box) for box in around), node["name"]


def _overlap(first, second):
    return all(first[i] < second[i + 2] and second[i] < first[i + 2] for i in (0, 1))


def _inside(inner, outer):
    return all(outer[i] <= inner[i] and inner[i + 2] <= outer[i + 2] for i in (0, 1))


def test_the_first_image_is_three_clicks_away(page, server):
    """From the template browser, with no model anywhere: the pack, the template, Run."""
    with nothing_wrong(page):
        page.evaluate("app.graph.clear()")
        browse(page)
        page.get_by_test_id("template-workflow-Try INT8 without a download").click()
        page.wait_for_function("!document.querySelector('[role=dialog]')")
        with posting(page) as posted:
            page.get_by_test_id("linear-run-button").get_by_role("button", name="Run").click()
        outputs = server.wait(posted.value.json()["prompt_id"], timeout=1200)
        badges = [badge["text"] for output in outputs.values() for badge in output.get("int8_dit_badges", ())]
        assert any(text.startswith("INT8") for text in badges)
        page.get_by_test_id("linear-image-output").first.wait_for()
        show_graph(page)
        wait_for_a_picture(page)
        assert_nothing_overlaps(page)


def wait_for_a_picture(page):
    """Until Preview Image shows one, and the nodes have grown in the frames after."""
    page.wait_for_function(
        """() => {
            const node = app.graph.nodes.find((node) => node.type === "PreviewImage");
            const images = [...(node.imgs ?? []), ...document.querySelectorAll(`[data-node-id="${node.id}"] img`)];
            return images.some((image) => image.naturalWidth > 0);
        }"""
    )
    settle(page)


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_opens_as_a_node(page, path):
    blueprint = read(path)
    with nothing_wrong(page):
        page.evaluate("workflow => app.loadGraphData(workflow)", blueprint)
        assert_opened(page, blueprint)
