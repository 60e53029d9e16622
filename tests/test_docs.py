"""The pages: their code runs, their links lead somewhere, their pictures are the published ones.

The links among the pages of docs/ are checked by `make docs`, whose warnings are errors.
"""

import re
from pathlib import Path

import pytest
import torch

import lowbit_optim
from benchmarks.common.report import RESULTS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "benchmarks" / "README.md"])
# Followed one by one, with more to hold them against, by other tests.
FOLLOWED = {
    "adding_a_format", "adding_an_engine", "adding_an_optimizer",  # test_adding
    "bf16_weights", "gradient_release",  # test_guides
}  # fmt: skip


def blocks_of(page):
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def names():
    """What the pages take for granted: a model, data for it and the loop around."""
    model = torch.nn.Module()
    model.embedding, model.body = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)
    model.norms, model.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 100)
    weights = [p for p in model.parameters() if p.dim() > 1]
    return {
        "model": model,
        "weights": weights,
        "biases_and_norms": [p for p in model.parameters() if p.dim() == 1],
        "steps": 10,
        "loader": [None] * 2,
        "train_one": lambda batch: None,
        "batches": [torch.arange(4)] * 2,
        "loss": lambda model, batch: model.head(model.body(model.embedding(batch))).sum(),
        "evaluate": lambda model: 0.0,
        "torch": torch,
        "AdamW8bit": lowbit_optim.AdamW8bit,
        "ScheduleFreeAdamW8bit": lowbit_optim.ScheduleFreeAdamW8bit,
    }


def own_code():
    """The pages with code that nobody else runs; tests/frameworks has the guides."""
    for page in PAGES:
        if blocks_of(page) and page.parent.name != "guides" and page.stem not in FOLLOWED:
            yield pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.usefixtures("manager")
@pytest.mark.parametrize("page", list(own_code()))
def test_code_runs(page, tmp_path, monkeypatch):
    """As it stands there, block after block; an optimizer that it ends with takes a step."""
    monkeypatch.chdir(tmp_path)
    given = names()
    with lowbit_optim.use_engine("torch"):  # which compiles nothing
        for number, block in enumerate(blocks_of(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), given)
        if "optimizer" in given:
            for group in given["optimizer"].param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            given["optimizer"].step()


def slugs(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if DOCS not in p.parents], ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), target
            assert not anchor or anchor in slugs(found), target


def test_pictures_are_the_published_ones():
    renamed = {"which_format": "formats"}
    for picture in DOCS.glob("*.png"):
        published = RESULTS / f"{renamed.get(picture.stem, picture.stem)}.png"
        assert picture.read_bytes() == published.read_bytes()


def test_every_export_is_described():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    described = set(re.findall(r"^::: lowbit_optim\.(\w+)$", text, re.MULTILINE))
    public = {name for name in vars(lowbit_optim) if name[0] != "_" and name[0].isalpha()}
    exported = {
        name
        for name in public
        if getattr(getattr(lowbit_optim, name), "__module__", "").startswith("lowbit_optim")
    }
    variants = {f"{name}{bits}bit" for name in described for bits in (4, 8, 32)}
    assert exported <= described | variants


def test_pages_load_nothing_from_elsewhere():
    """No font and no script: what mkdocs.yml would have to say for either."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  font: false\b", settings, re.MULTILINE)
    assert "https://" not in settings
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^]]*\]\(https?:|```mermaid|<script|<img", text), page


def test_the_architecture_page_lists_every_room():
    """Of optimizers one file is listed for all."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("```\n")[2]
    drawn = set(re.findall(r"\w+\.py|\w+/", text.partition("```")[0]))
    upper, cli = ROOT / "lowbit_optim", ROOT / "lowbit_optim_cli"
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name
        for folder in (upper, cli, ROOT / "kernels" / "lowbit_optim_kernels")
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    optimizers = {path.name for path in upper.glob("_*.py") if "@documented" in path.read_text()}
    assert rooms - optimizers - {"__init__.py", "__main__.py"} <= drawn
    folders = [ROOT, *(x for top in ("lowbit_optim*", "kernels") for x in ROOT.glob(f"{top}/**/"))]
    assert all(any((folder / name).exists() for folder in folders) for name in drawn)
