"""What is said of the nodes says the same everywhere: in their schemas, in every language, on their help pages."""

import ast
import json
import re

import pytest

from support.node_texts import LOCALES, english_texts, flat, own_nodes, read_texts
from support.server import PROJECT

HELP = PROJECT / "web" / "docs"
TRANSLATIONS = {"zh": r"[\u4e00-\u9fff]", "ja": r"[\u3040-\u30ff\u4e00-\u9fff]"}  # what each language is written with
PLACEHOLDER = re.compile(r"\{\w+\}")
MOST_PICTURE_BYTES = 25_000
REFRESH = "COMFYUI_PATH=... python tests/describe_nodes.py"


@pytest.fixture(scope="module")
def nodes(server):
    return own_nodes(json.loads(server.get("/object_info")))


@pytest.fixture(scope="module")
def english(nodes):
    return dict(flat(english_texts(nodes)))


def listed(title, keys):
    return "".join(f"\n  {title}: {key}" for key in sorted(keys))


def test_english_is_what_the_nodes_say(english):
    written = dict(flat(read_texts("en")))
    changed = listed("changed", {key for key in written.keys() & english.keys() if written[key] != english[key]})
    keys = listed("missing", english.keys() - written) + listed("no longer there", written.keys() - english)
    assert not changed + keys, f"locales/en/nodeDefs.json is not what the nodes say; run {REFRESH}{keys}{changed}"


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_every_text_is_translated(english, language):
    written = dict(flat(read_texts(language)))
    keys = listed("missing", english.keys() - written) + listed("no longer there", written.keys() - english)
    assert not keys, f"locales/{language}/nodeDefs.json{keys}"
    prose = {key for key in english if key.endswith((".tooltip", ".description", ".display_name"))}
    foreign = {key for key in prose if not re.search(TRANSLATIONS[language], written[key])}
    assert not foreign, listed("not translated", foreign)


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_translations_keep_the_figures(english, language):
    """A number that changed in English must change in all languages."""
    written = dict(flat(read_texts(language)))

    def figures(text):
        return set(re.findall(r"\d+(?:\.\d+)*", text))

    lost = {key: figures(text) - figures(written[key]) for key, text in english.items() if key in written}
    assert not {key: numbers for key, numbers in lost.items() if numbers}


@pytest.mark.parametrize("language", ("en", *TRANSLATIONS))
def test_no_text_is_taken_for_the_frontends_own_syntax(language):
    """Names and descriptions are messages of vue-i18n there, and tooltips are not."""
    messages = {key: text for key, text in flat(read_texts(language)) if not key.endswith(".tooltip")}
    assert not {key for key, text in messages.items() if re.search(r"[{}@|$]", text)}


@pytest.mark.parametrize("language", ("en", *TRANSLATIONS))
def test_comfyui_serves_them(server, language):
    served = json.loads(server.get("/i18n"))[language]
    assert read_texts(language).items() <= served["nodeDefs"].items()
    if language != "en":  # English is the category's own name
        assert re.search(TRANSLATIONS[language], served["nodeCategories"]["quantization"])


def test_every_node_has_a_help_page_and_a_picture_and_no_other_has(nodes):
    assert {path.stem for path in HELP.glob("*.md")} == nodes.keys()
    pictures = {path.stem: path.stat().st_size for path in (HELP / "pictures").iterdir()}
    assert pictures.keys() == nodes.keys()
    assert not {name for name, size in pictures.items() if size > MOST_PICTURE_BYTES}


def documented(page, section):
    """The names in the first column of a table of a help page."""
    table = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"^\| \*\*(.+?)\*\* \|", table, re.MULTILINE) for name in row.split(", ")}


def test_help_pages_name_what_the_nodes_have(nodes):
    problems = set()
    for node, info in nodes.items():
        page = (HELP / f"{node}.md").read_text(encoding="utf-8")
        title = info["display_name"]
        if not re.match(rf"# {re.escape(title)}\n\n.+\n\n!\[{re.escape(title)}\]\(pictures/{node}\.png\)\n\n", page):
            problems.add(f"{node}: it does not begin with its name, a sentence and its picture")
        sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
        if sections[:2] != ["When to use", "Inputs"] or sections[-1] != "Typical errors":
            problems.add(f"{node}: its sections are {sections}")
        inputs = {name for group in ("required", "optional") for name in info["input"].get(group, {})}
        for section, own in (("Inputs", inputs), ("Outputs", set(info["output_name"]))):
            problems |= {f"{node}: {section} lacks {name}" for name in own - documented(page, section)}
            problems |= {f"{node}: {section} has {name}, the node has not" for name in documented(page, section) - own}
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
        foreign = {key for key, text in words.items() if not re.search(TRANSLATIONS[language], text)}
        assert not foreign, listed("not translated", foreign)
