"""The playground's page and its one question, over HTTP."""

from __future__ import annotations

import re

import pytest


def test_the_page_is_whole_and_reaches_nothing_else(server):
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text)
    assert {part.split(".")[-1] for part in parts} == {"css", "js"}
    for path in [*parts, "playground/core.js"]:
        part = server.get(f"/{path}")
        assert part.status_code == 200
        kind = "css" if path.endswith("css") else "javascript"
        assert part.headers["content-type"].startswith(f"text/{kind}")
        assert "://" not in part.text
    assert "://" not in page.text
    assert server.get("/playground/__init__.py").status_code == 404


def test_it_can_be_switched_off(serve):
    server = serve(playground=False)
    assert server.get("/").status_code == 404
    assert server.get("/playground/app.js").status_code == 404
    assert server.post("/playground/check", {}).status_code == 404


def test_the_page_needs_no_key_but_its_question_does(serve):
    server = serve(api_keys=["secret"])
    assert server.get("/").status_code == 200
    question = {"kind": "regex", "source": "a"}
    assert server.post("/playground/check", question).status_code == 401
    assert server.post("/playground/check", question, headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "source", "inside", "outside"),
    [
        ("json_object", "", "{}", "[]"),
        ("json_schema", '{"const": "a"}', '"a"', "a"),
        ("grammar", 'root ::= "a"+', "aa", "b"),
        ("regex", "[ab]", "a", "ab"),
        ("choice", ["left", "right"], "left", "up"),
    ],
)
def test_an_output_form_and_a_text_are_checked(server, kind, source, inside, outside):
    def ask(**text):
        return server.post("/playground/check", {"kind": kind, "source": source, **text}).json()

    assert ask() == {"error": None}
    assert ask(text=inside) == {"error": None, "accepts": True}
    assert ask(text=outside) == {"error": None, "accepts": False}


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", '{"type": ', "line 1"),
        ("json_schema", '{"type": "text"}', "/type"),
        ("grammar", "root ::= x", "line 1"),
        ("regex", "(a", "offset 0"),
        ("choice", [], "nothing to choose"),
    ],
)
def test_what_is_wrong_with_a_form_is_told(server, kind, source, says):
    answer = server.post("/playground/check", {"kind": kind, "source": source})
    assert answer.status_code == 200
    assert says in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "kind"),
        ({"kind": "poem"}, "kind"),
        ({"kind": []}, "kind"),
        ({"kind": "regex"}, "source"),
        ({"kind": "regex", "source": ["a"]}, "source"),
        ({"kind": "choice", "source": "a"}, "source"),
        ({"kind": "choice", "source": [1]}, "source[0]"),
        ({"kind": "regex", "source": "a", "texts": "a"}, "texts"),
        ({"kind": "regex", "source": "a", "text": 1}, "text"),
    ],
)
def test_a_malformed_question_is_a_400(server, body, field):
    answer = server.post("/playground/check", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
