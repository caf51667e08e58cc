"""What is said of the nodes says the same everywhere: in their schemas, in every language, on their help pages."""

import ast
import json
import re

import pytest

from support.node_texts import LOCALES, english_texts, flat, own_nodes, read_texts
from support.server import PROJECT

HELP = PROJECT / "web" / "docs"
TRANSLATIONS = {"zh": r"[\u4e00-\u9fff]", "ja": r"[\u3040-\u30ff\u4e00-\u9fff]"}  # what each language is written with
ENGLISH = r"\b[a-z]+(?: [a-z]+){2,}"  # three words after each other
PLACEHOLDER = re.compile(r"\{\w+\}")
MOST_PICTURE_BYTES = 25_000


@pytest.fixture(scope="module")
def nodes(server):
    return own_nodes(json.loads(server.get("/object_info")))


@pytest.fixture(scope="module")
def english(nodes):
    return dict(flat(english_texts(nodes)))


def listed(title, keys):
    return "".join(f"\n  {title}: {key}" for key in sorted(keys))


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_every_text_is_translated(english, language):
    """With its figures: a number that changed in English must change in all languages."""
    written = dict(flat(read_texts(language)))
    keys = listed("missing", english.keys() - written) + listed("no longer there", written.keys() - english)
    assert not keys, f"locales/{language}/nodeDefs.json{keys}"
    prose = {key for key in english if key.endswith((".tooltip", ".description", ".display_name"))}
    foreign = {key for key in prose if not re.search(TRANSLATIONS[language], written[key])}
    assert not foreign, listed("not translated", foreign)
    figures = {key: set(re.findall(r"\d+(?:\.\d+)*", text)) for key, text in english.items()}
    lost = {key for key, numbers in figures.items() if numbers - set(re.findall(r"\d+(?:\.\d+)*", written[key]))}
    assert not lost, listed("other figures", lost)
    # Names and descriptions are messages of vue-i18n, and tooltips are not.
    messages = {key for key in written if not key.endswith(".tooltip")}
    assert not {key for key in messages if re.search(r"[{}@|$]", written[key])}


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_comfyui_serves_them(server, language):
    served = json.loads(server.get("/i18n"))[language]
    assert read_texts(language).items() <= served["nodeDefs"].items()
    assert re.search(TRANSLATIONS[language], served["nodeCategories"]["quantization"])


def test_every_node_has_a_help_page_and_a_picture_and_no_other_has(nodes):
    assert {path.stem for path in HELP.glob("*.md")} == nodes.keys()
    pictures = {path.stem: path.stat().st_size for path in (HELP / "pictures").iterdir()}
    assert pictures.keys() == nodes.keys()
    assert not {name for name, size in pictures.items() if size > MOST_PICTURE_BYTES}


def documented(page, section):
    """The names that begin the lines of a help page's list."""
    lines = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for line in re.findall(r"^- \*\*(.+?)\*\*: ", lines, re.MULTILINE) for name in line.split(", ")}


def test_help_pages_name_what_the_nodes_have(nodes):
    problems = set()
    for node, info in nodes.items():
        page = (HELP / f"{node}.md").read_text(encoding="utf-8")
        sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
        if sections[:2] != ["When to use", "Inputs"] or sections[-1] != "Typical errors":
            problems.add(f"{node}: its sections are {sections}")
        inputs = {name for group in ("required", "optional") for name in info["input"].get(group, {})}
        for section, own in (("Inputs", inputs), ("Outputs", set(info["output_name"]))):
            problems |= {f"{node}: {section} lacks {name}" for name in own - documented(page, section)}
            problems |= {f"{node}: {section} has {name}, the node has not" for name in documented(page, section) - own}
    assert not problems


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_help_pages_are_translated(language):
    """With the sections of the English pages, which web/help.js finds by their places, and the nodes' own names."""
    problems, texts = set(), read_texts(language)
    pages = {path.parent.name: path.read_text("utf-8") for path in HELP.glob(f"*/{language}.md")}
    assert pages.keys() == texts.keys()
    for node, page in pages.items():
        own, english = texts[node], (HELP / f"{node}.md").read_text("utf-8")
        sections = len(re.findall("^## ", page, re.MULTILINE))
        if sections != len(re.findall("^## ", english, re.MULTILINE)):
            problems.add(f"{node}: it has other sections than the English page")
        slots = [*own["inputs"].values(), *own.get("outputs", {}).values()]
        lines = {
            f"\n- **{slot['name']}**\uff1a{slot['tooltip']}\n" for slot in slots if slot.keys() >= {"name", "tooltip"}
        }
        problems |= {f"{node}: it lacks{line}" for line in lines if line not in page}
        prose = re.sub(r"`.*?`|\*.*?\*|\(.*?\)", "", page)
        problems |= {f"{node}: not translated: {words}" for words in re.findall(ENGLISH, prose)}
    assert not problems


def messages_of_the_code():
    """Every text in the code, with … for what is filled in."""
    for room in ("kernels", "nodes"):
        for path in (PROJECT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_typical_errors_are_errors_of_the_code():
    messages = list(messages_of_the_code())
    unknown = set()
    for path in HELP.glob("*.md"):
        errors = path.read_text(encoding="utf-8").partition("\n## Typical errors\n")[2]
        quotes = [quote for line in re.findall(r"^- (.+?):", errors, re.MULTILINE) for quote in line.split(" and *")]
        assert quotes, path.name
        for quote in quotes:
            pattern = ".*".join(re.escape(part) for part in quote.strip("*").split("…"))
            if not any(re.search(pattern, message) for message in messages):
                unknown.add(f"{path.name}: {quote}")
    assert not unknown


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_typical_errors_are_quoted_as_they_are_translated(language):
    catalog = json.loads((LOCALES / language / "main.json").read_text("utf-8"))["int8_dit"]
    shown, unknown = [PLACEHOLDER.sub("…", text) for text in catalog.values()], set()
    shown.append("bypass")  # what ComfyUI calls a loader
    for path in HELP.glob(f"*/{language}.md"):
        errors = path.read_text(encoding="utf-8").rpartition("\n## ")[2]
        quotes = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", errors)
        assert quotes, path.parent.name
        for quote in quotes:
            pattern = ".*".join(re.escape(part) for part in quote.split("…"))
            if not any(re.search(pattern, text) for text in shown):
                unknown.add(f"{path.parent.name}: {quote}")
    assert not unknown


def test_patterns_of_sentences_are_translated():
    """web/translations.js: the same English patterns in each language, each with its own placeholders in it."""
    catalogs = {
        language: json.loads((LOCALES / language / "main.json").read_text("utf-8"))["int8_dit"]
        for language in TRANSLATIONS
    }
    for language, patterns in catalogs.items():
        first = catalogs[next(iter(TRANSLATIONS))]
        assert patterns.keys() == first.keys(), listed(language, patterns.keys() ^ first.keys())
        wrong = {
            key for key, text in patterns.items() if set(PLACEHOLDER.findall(key)) != set(PLACEHOLDER.findall(text))
        }
        assert not wrong, listed("other placeholders", wrong)
        words = {key: text for key, text in patterns.items() if re.search("[a-z]{3}", PLACEHOLDER.sub("", key))}
        titles = set(dict(flat(read_texts(language))).values())  # 'Sigmas' is what a Chinese node calls the input
        foreign = {key for key, text in words.items() if not re.search(TRANSLATIONS[language], text)}
        foreign = {key for key in foreign if words[key] not in titles}
        assert not foreign, listed("not translated", foreign)


def test_what_widgets_can_be_set_to_is_translated(nodes):
    """But for names of formats and of files, which are the same in all languages."""
    values = {value for info in nodes.values() for value in options_of(info["input"])}
    words = {value for value in values if re.search("[a-z]{4}|none|auto", value) and "." not in value}
    for language in TRANSLATIONS:
        options = json.loads((LOCALES / language / "main.json").read_text("utf-8"))["int8_dit_options"]
        assert options.keys() == words, listed(language, options.keys() ^ words)
        assert all(re.search(TRANSLATIONS[language] + "|comfy-kitchen", text) for text in options.values())


def options_of(inputs):
    """What the combos of a node offer, those below a choice among them."""
    for group in inputs.values():
        for kind, *options in group.values() if isinstance(group, dict) else ():
            choices = options[0].get("options", ()) if options else ()
            if kind == "COMFY_DYNAMICCOMBO_V3":
                for choice in choices:
                    yield choice["key"]
                    yield from options_of(choice["inputs"])
            elif kind == "COMBO":
                yield from choices
