"""Check tools/recipe.yaml, the recipe of conda: it renders, and has the version and the dependencies of pyproject.toml.

    python tools/check_recipe.py                        # needs pip install py-rattler-build
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import rattler_build

ROOT = Path(__file__).resolve().parent.parent


def plain(requirement: str) -> str:
    """Return a requirement without blanks."""
    return re.sub(r"\s", "", requirement)


def main() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "tools" / "recipe.yaml").read_text(encoding="utf-8")
    least = project["requires-python"].removeprefix(">=")
    recipe = rattler_build.Stage0Recipe.from_yaml(text)
    variants = recipe.render(rattler_build.VariantConfig.from_yaml(f'python_min: ["{least}"]\n'))
    rendered = variants[0].recipe.to_dict()
    version = rendered["package"]["version"]
    if version != project["version"]:
        raise SystemExit(f"tools/recipe.yaml has version {version}, pyproject.toml has {project['version']}")
    wanted = {plain(each) for each in project["dependencies"]} | {f"python>={least}"}
    found = {plain(each) for each in rendered["requirements"]["run"]}
    if found != wanted:
        raise SystemExit(f"tools/recipe.yaml and pyproject.toml differ in {sorted(found ^ wanted)}")
    print(f"tools/recipe.yaml renders: {rendered['package']['name']} {version}")


if __name__ == "__main__":
    main()
