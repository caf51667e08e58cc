"""The server's warnings in the browser: who sees them, how often, and how they are silenced."""

import json
import typing

from support import workflows
from support.frontend import WARNING, load, reload, run, set_setting, settle
from support.server import TESTS
from support.workflows import Prompt

MUTE, SETTING = f"{WARNING} .int8-warning-mute", "INT8DiT.Warnings.bf16"
IN_LOG = "INT8 DiT runs in fp32"


def falls_back(seed):
    """A sampling that runs in bf16 and warns of it; each seed anew."""
    prompt = Prompt()
    workflows.glyph_images(
        prompt, workflows.int8_model(prompt, workflows.GLYPH_MODEL, kernel="auto"), text="A", steps=1, seed=seed
    )
    return prompt


def warn(page, **warning):
    page.evaluate(
        """detail => app.api.dispatchEvent(new CustomEvent("int8_dit.warning", { detail }))""",
        {"reason": "bf16", "summary": "Summary", "detail": "detail", "node": None} | warning,
    )


def test_the_demo_s_workflow_runs_and_warns_once(page, server):
    prompt = Prompt()  # the file that it names
    workflows.save_model(prompt, workflows.calibrated_model(prompt, workflows.stock_model(prompt), text="A", steps=2))
    server.queue(prompt)
    load(page, json.loads((TESTS / "glyph_nodes" / "example_workflows" / "int8_glyphs.json").read_text("utf-8")))
    kinds = {kind for output in run(page, server).values() for kind in output}
    assert {"images", "saved", "int8_benchmark", "int8_dit_badges"} <= kinds
    text = page.wait_for_selector(WARNING).text_content()
    assert IN_LOG in text and page.locator(WARNING).count() == 1


def test_three_runs_warn_once_and_only_who_queued_them(page, server, new_client):
    other = new_client()
    logged = server.log.read_text().count(IN_LOG)
    for seed in range(3):
        run(page, server, falls_back(seed))
        page.wait_for_selector(WARNING)
    server.queue(falls_back(3))  # by a script, which nobody watches
    settle(page)
    assert page.locator(WARNING).count() == 1 and other.locator(WARNING).count() == 0
    assert server.log.read_text().count(IN_LOG) == logged + 4

    page.click(f"{WARNING} [aria-label=Close]")
    reload(page)
    run(page, server, falls_back(4))
    run(other, server, falls_back(5))
    other.wait_for_selector(WARNING)
    assert page.locator(WARNING).count() == 0


def test_do_not_show_again_lasts_until_the_setting_is_changed(page, server, new_client):
    run(page, server, falls_back(10))
    with page.expect_response(lambda response: SETTING in response.url and response.ok):
        page.click(MUTE)
    page.wait_for_selector(WARNING, state="detached")

    later = new_client()  # another session, so that it was not seen in this one yet
    warn(later, reason="attention", detail="another reason")
    run(later, server, falls_back(11))
    settle(later)
    assert [text for text in later.locator(WARNING).all_text_contents() if "another reason" not in text] == []
    assert later.locator(WARNING).count() == 1

    for client in (page, later):
        set_setting(client, SETTING, False)  # as the server keeps it
        set_setting(client, SETTING, True)
        run(client, server, falls_back(12 + (client is page)))
        client.wait_for_selector(f"{WARNING}:has-text('{IN_LOG}')")


def test_the_settings_are_shown(page, pack):
    """One for each reason that the server knows."""
    from int8_dit.nodes.host.notices import Reason

    reasons = typing.get_args(Reason)
    assert reasons and all(
        page.evaluate("name => app.extensionManager.setting.get(name)", f"INT8DiT.Warnings.{reason}") is True
        for reason in reasons
    )
    page.evaluate("app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.locator("[role=dialog]").get_by_text("INT8 DiT", exact=True).first.click()
    page.wait_for_selector("text=A model runs in bf16 instead of INT8")


def test_one_reason_is_one_warning(page):
    for reason, detail in (("bf16", "first <b>detail</b>"), ("bf16", "second"), ("attention", "third")):
        warn(page, reason=reason, detail=detail)
    texts = page.locator(WARNING).all_text_contents()
    assert len(texts) == 2 and "first <b>detail</b>" in texts[0] and "third" in texts[1]
