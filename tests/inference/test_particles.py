"""Tests of Particles against sums written by hand."""

import warnings
from dataclasses import dataclass
from math import exp, log

import numpy as np
import pytest

from llmppl.inference.particles import Death, Particles, deaths_of


@dataclass
class Run:
    text: str
    log_weight: float
    cut: bool = False

    def __str__(self) -> str:
        return self.text


def three() -> Particles[Run]:
    """Return particles of weights 1, 5, 2 with Z-hat 8, and a dead one."""
    return Particles([Run("a", log(1)), Run("b", log(5)), Run("dead", -np.inf), Run("c", log(2))])


def test_only_particles_of_positive_weight_are_kept_the_heaviest_first():
    particles = three()
    assert len(particles) == 3
    assert particles.texts == ["b", "c", "a"]
    assert str(particles[-1]) == "a" and [str(particle) for particle in particles[1:]] == ["c", "a"]
    assert isinstance(particles[1:], list)
    assert particles[1] in particles
    with pytest.raises(IndexError):
        particles[3]


def test_weights_log_ml_and_ess_agree_with_hand_computation():
    particles = three()
    np.testing.assert_allclose(particles.log_weights, [log(5), log(2), log(1)])
    np.testing.assert_allclose(particles.weights, [5 / 8, 2 / 8, 1 / 8])
    assert particles.log_ml == pytest.approx(log(8))
    assert particles.ess == pytest.approx(64 / (1 + 25 + 4))
    assert particles.best.text == "b"


def test_equal_texts_are_merged_the_largest_weight_first():
    particles = Particles([Run("a", log(1)), Run("b", log(3)), Run("a", log(4)), Run("c", log(8))])
    assert particles.texts == ["c", "a", "b", "a"]
    merged = particles.by_text()
    assert [*merged] == ["c", "a", "b"] and [*merged.values()] == pytest.approx([8 / 16, 5 / 16, 3 / 16])
    assert Particles([]).texts == [] and Particles([]).by_text() == {}


def test_weights_are_right_far_from_one():
    for shift in [-1e5, 800.0]:
        particles = Particles([Run("a", shift), Run("b", shift + log(3)), Run("c", shift - 2000)])
        np.testing.assert_allclose(particles.weights, [0.75, 0.25, 0])
        assert particles.log_ml == pytest.approx(shift + log(4))
        assert particles.ess == pytest.approx(1 / (1 / 16 + 9 / 16))


def test_weights_are_read_only():
    for array in [three().log_weights, three().weights]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


def test_expect_averages_numbers_truth_values_and_arrays_by_weight():
    particles = three()
    value = {"a": 1.0, "b": 2.0, "c": 4.0}
    mean = particles.expect(lambda particle: value[particle.text])
    assert mean == pytest.approx((1 + 10 + 8) / 8) and isinstance(mean, float)
    probability = particles.expect(lambda particle: particle.text in "ac")
    assert probability == pytest.approx(3 / 8) and isinstance(probability, float)
    array = particles.expect(lambda particle: np.array([[value[particle.text]], [1.0]]))
    np.testing.assert_allclose(array, [[19 / 8], [1.0]])


def test_sample_draws_by_weight_within_the_standard_error():
    drawn = [particle.text for particle in three().sample(4000, seed=1)]
    for text, weight in [("a", 1 / 8), ("b", 5 / 8), ("c", 2 / 8)]:
        assert abs(drawn.count(text) / 4000 - weight) < 4.5 * np.sqrt(weight * (1 - weight) / 4000)


def test_sample_gives_a_particle_or_a_list_of_particles():
    particles = three()
    assert isinstance(particles.sample(), Run)
    assert isinstance(particles.sample(rng=np.random.default_rng(0)), Run)
    assert len(particles.sample(2)) == 2 and particles.sample(0) == []
    assert particles.sample(9, seed=7) == particles.sample(9, rng=np.random.default_rng(7))
    with pytest.raises(ValueError, match="seed= or rng=, not both"):
        particles.sample(seed=1, rng=np.random.default_rng(1))
    with pytest.raises(ValueError, match="n must be at least 0, not -1"):
        particles.sample(-1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_invalid_log_weight_is_an_error_naming_the_particle(bad):
    with pytest.raises(ValueError, match=f"particle 1 has log weight {bad}"):
        Particles([Run("a", 0.0), Run("b", bad)])


def test_all_dead_gives_log_ml_minus_infinity_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for particles in [Particles([]), Particles([Run("dead", -np.inf)] * 3)]:
            assert len(particles) == 0 and list(particles) == []
            assert particles.log_ml == -np.inf and exp(particles.log_ml) == 0
            assert particles.ess == 0.0
            assert particles.log_weights.shape == particles.weights.shape == (0,)


def test_drawing_from_dead_particles_reports_when_and_why():
    deaths = [Death(1, "observe('q')")] * 2 + [Death(3, "condition(False) at model.py:12", count=28)]
    particles = Particles([], deaths=deaths)
    message = (
        "no particle is left: all died by step 3: 28 of 30: condition(False) at model.py:12; "
        "2 of 30 at step 1: observe('q'); log_ml is -inf"
    )
    for ask in [particles.sample, lambda: particles.sample(3), lambda: particles.best, lambda: particles.expect(len)]:
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == message
    with pytest.raises(ValueError, match="none has a positive weight, and no death was recorded; log_ml is -inf"):
        Particles([]).sample()


def test_only_the_five_most_common_deaths_are_listed():
    deaths = [Death(step, f"reason {step}", count=10 - step) for step in range(1, 9)]
    with pytest.raises(ValueError) as error:
        Particles([], deaths=deaths).sample()
    assert "all died by step 8: 9 of 44 at step 1: reason 1; " in str(error.value)
    assert "5 of 44 at step 5: reason 5; 9 for other reasons; log_ml" in str(error.value)      # 4 + 3 + 2
    assert "reason 6" not in str(error.value)


def test_deaths_in_one_step_are_grouped_by_reason_and_bounded():
    class Dead(Run):
        death = None
        _drawn_text_ = property(str)

    reason = "observe: " + "x" * 500 + " (here.py, line 3)"
    dead = [Dead("a", -np.inf), Dead("b", 0.0), Dead("y" * 500 + "end", -np.inf), Dead("d", -np.inf)]
    dead[0].death, dead[3].death = "condition is false", "condition is false"
    dead[2].death = reason
    two, one = deaths_of(4, dead)
    assert two == Death(4, "condition is false", 2, "a") and deaths_of(4, dead[1:2]) == ()
    assert (one.count, one.text) == (1, "y" * 97 + "end") and len(one.reason) == 200
    assert one.reason.startswith("observe: xxx") and one.reason.endswith("line 3)")
    assert deaths_of(1, [Dead("", -np.inf)])[0].reason == "weight zero"


def test_deaths_show_as_a_table_with_the_most_common_first():
    deaths = [Death(1, "x", 2, "one"), Death(2, "y", 9), Death(7, "x", 3, "se\nven"), Death(7, "z", 1)]
    told = Particles([], deaths=deaths).deaths
    assert repr(told) == "\n".join(
        [
            "Deaths(15 particles)",
            "",
            "count  steps  reason",
            "    9      2  y",
            "    5    1-7  x, one with the text 'se\\\\nven'",
            "    1      7  z",
        ]
    )
    assert repr(Particles([]).deaths) == "Deaths(0 particles)"
    assert told == tuple(deaths) and told[1:2] == (deaths[1],)
    many = repr(Particles([], deaths=[Death(1, f"reason {i}", 100 - i) for i in range(23)]).deaths)
    assert many.endswith("reason 19\n... and 3 more")


def test_a_weight_of_one_is_printed_without_a_sign():
    assert "log_ml=0.00" in repr(Particles([Run("a", -1e-9)])) and "-0.00" not in repr(Particles([Run("a", -1e-9)]))


def test_tables_fold_equal_texts_the_heaviest_first():
    runs = [Run("b", log(4)), Run("a", log(3)), Run("a", log(2)), Run("a", log(1), cut=True)]
    particles = Particles(runs, stats="7 tokens run")
    assert repr(particles).splitlines() == [
        "Particles(4 of positive weight, log_ml=2.30, ess=3.3)", "2 different texts", "",
        "weight  log weight  text",
        " 0.500        1.61  a [x2]",
        " 0.400        1.39  b",
        " 0.100        0.00  a [cut]",
        "", "7 tokens run",
    ]  # fmt: skip
    page = particles._repr_html_()
    assert "a [x2]" in page and page.count("<tr>") == 4 and 'width="63.4"' in page


def test_repr_marks_cuts_and_shows_each_text_on_one_line():
    long = "begin " + "x" * 500 + " end"
    rows = repr(Particles([Run("a\nb\tc \u00e9", 0.0), Run("more", -1.0, cut=True), Run(long, -2.0)])).split("\n")[4:]
    assert rows[0].endswith("  a\\nb\\tc \u00e9")
    assert rows[1].endswith("  more [cut]")
    assert "begin xxx" in rows[2] and " … " in rows[2] and rows[2].endswith("xxx end")
    assert len(rows[2]) == len(" 0.090       -2.00  ") + 90


def test_repr_of_no_particles_says_why():
    particles = Particles([], deaths=[Death(3, "condition(x < 2)", 28)])
    assert repr(particles) == (
        "Particles(0 of positive weight, log_ml=-inf, ess=0.0)\n"
        "all died by step 3: 28 of 28: condition(x < 2)"
    )
    assert "28 of 28: condition(x &lt; 2)" in particles._repr_html_()
    assert "<table" not in particles._repr_html_()


def test_the_notebook_view_escapes_text_and_sets_no_colour():
    page = Particles([Run("<script>&", 0.0, cut=True)], stats="<7 tokens>")._repr_html_()
    assert "&lt;script&gt;&amp; [cut]" in page and "<script>" not in page
    assert "&lt;7 tokens&gt;" in page
    assert "color" not in page and "background" not in page
    assert page.count("<tr>") == page.count("</tr>") == 2
