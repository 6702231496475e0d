"""OpenAPI and the written reference say what the method table has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import openapi_spec_validator

from controlplane.api.methods import load_methods
from controlplane.api.openapi import describe_api
from controlplane.errors import all_errors
from tests.support.api import HEADERS, open_api
from tests.support.api_reference import methods_page

if TYPE_CHECKING:
    import pytest

    from tests.support.postgres import Dsn

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGE = DOCS / "api-methods.md"


def test_the_document_is_valid_openapi() -> None:
    openapi_spec_validator.validate(describe_api(load_methods(), version="1.2.3"))


async def test_the_document_is_served_and_has_every_method(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        document = (await api.send("GET", "/openapi.json", headers={"authorization": ""})).body
        paths = {path for path, operations in document["paths"].items() if "post" in operations}
        assert paths == {f"/api/compute/{path}" for path in load_methods()}
        assert set(re.findall(r"[A-Z_]{4,}", document["components"]["responses"]["error"]["description"])) == {
            error.code for error in all_errors()
        }
        for path, operations in document["paths"].items():
            for method in operations:  # without a credential, because a stream would not end
                answer = await api.client.request(method.upper(), path, json={}, headers=HEADERS)
                assert answer.status_code != 404


def test_every_field_of_every_input_has_a_bound() -> None:
    """A text without a length, a number without an end or a list without a size is a way to exhaust the server."""
    document = describe_api(load_methods(), version="0")
    schemas = document["components"]["schemas"]
    unbounded: list[str] = []
    for path, operations in document["paths"].items():
        if "post" not in operations:
            continue
        ref = operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for name, field in schemas[ref.rsplit("/", 1)[1]].get("properties", {}).items():
            for choice in field.get("anyOf", [field]):
                bound = {"string": "maxLength", "integer": "maximum", "number": "maximum", "array": "maxItems"}
                needed = bound.get(choice.get("type", ""))
                if needed and needed not in choice and not {"enum", "format"} & set(choice):
                    unbounded.append(f"{path} {name}")
    assert not unbounded


def test_the_reference_has_every_method(request: pytest.FixtureRequest) -> None:
    page = methods_page()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, (
        "run pytest tests/controlplane/api/test_reference.py --update-golden"
    )
