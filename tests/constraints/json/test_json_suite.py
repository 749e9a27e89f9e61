"""The official test suite of JSON Schema, drafts 7 and 2020-12: admission of its texts by masks and `parse`."""

from functools import cache

import pytest
from helpers.common import repetitions
from helpers.json_suite import DRAFTS, Counts, cases, count

REASONS = {                                             # of refused valid texts; docs/constraints.md states each
    "order": "properties in another order than the schema's",
    "number's spelling": "5.0 for an integer, an exponent, or more digits than masks have",
    "format": "`format` is an assertion",
}
VOCABULARIES = "vocabulary.json"                        # own metaschemas: each keyword means what it always means
ANNOTATIONS = {"draft7": ["optional/content.json"], "draft2020-12": []}     # keywords that later drafts do not assert
MOST_REFUSED = 0.02                                     # of the schemas with an instance


@cache
def counts(draft: str) -> Counts:
    found = count(list(cases(draft))[:: repetitions(1, 5)])
    print(f"\n{draft}: {found}")
    return found


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_text_of_the_suite_is_admitted(draft):
    assert [each for each in counts(draft).wrong if each[0] not in ANNOTATIONS[draft]] == []


@pytest.mark.parametrize("draft", DRAFTS)
def test_valid_texts_of_the_suite_are_refused_for_documented_reasons_only(draft):
    found = counts(draft)
    assert [each for each in found.unexplained if not each.startswith(VOCABULARIES)] == []
    assert {reason.partition(",")[0] for reason in found.valid} <= {"admitted", "unexplained", *REASONS}
    assert found.valid["admitted"] >= 0.9 * found.valid.total()


@pytest.mark.parametrize("draft", DRAFTS)
def test_few_schemas_of_the_suite_are_refused(draft):
    found = counts(draft)
    assert found.refused.total() <= MOST_REFUSED * found.schemas, str(found)
