"""`ingot plan`: what a training will need and cost, before anything is started; and the few lines
of it that end every dry run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.completion import complete_arguments

if TYPE_CHECKING:
    from ingot.config.recipe import Recipe
    from ingot.config.values import Findings, Values
    from ingot.plan.assemble import ModelKnown, RunPlan
    from ingot.plan.checks.finding import PlanFinding
    from ingot.plan.place import PlannedPlace

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [PLACE] KEY=VALUE...",
        autocompletion=complete_arguments,
        help="Recipe files and overrides; later ones win.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="What ranks run on, where the place does not tell: cpu, a type such as h100, or a"
        " machine such as p5.48xlarge.",
        show_default=False,
    ),
]

Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Keep it in the run folder; `ingot show run` then puts it beside what came.",
    ),
]
Learn = Annotated[
    str | None,
    typer.Option(
        "--learn",
        metavar="RUN",
        help="Correct what is known of a device by what the steps of a run took, whose plan was"
        " kept.",
        show_default=False,
    ),
]
Forget = Annotated[
    str | None,
    typer.Option(
        "--forget",
        metavar="DEVICE",
        help="Take away what was learned about a device.",
        show_default=False,
    ),
]


def plan(
    arguments: Arguments = None,
    device: Device = None,
    searching: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Which layout, micro-batch and recomputation is fastest, and which cheapest.",
        ),
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N..M",
            help="With --search: from N to M devices, doubling. Default: those of the place.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="With --search: US dollars at the most.", show_default=False),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="With --search: time at the most, such as 24h or 7d.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, all numbers with ranges.")
    ] = False,
    cloud: Annotated[
        bool, typer.Option("--cloud", help="Ask Google Cloud for machine types and quota, too.")
    ] = False,
    keep: Keep = False,
    learn: Learn = None,
    forget: Forget = None,
) -> int:
    """Does it fit, how long does it take, what does it cost: traces a step of the training without
    weights, and checks all that can be known beforehand. Exit code 1 if it does not fit.
    """
    from ingot.base.errors import EXIT_DONE, EXIT_FAILED, WrongInput

    for_search = (devices, budget, deadline) != (None, None, None)
    if learn is not None or forget is not None:
        others = (arguments, device, searching, for_search, as_json, cloud, keep)
        return _correct(learn, forget, alone=not any(others))
    if not arguments:
        raise WrongInput("plan needs a recipe, such as quickstart; or --learn RUN")
    if searching:
        if keep or cloud:
            raise WrongInput("--keep and --cloud are for a plan, not for --search")
        return _search(arguments, device, devices, budget, deadline, as_json=as_json)
    if for_search:
        raise WrongInput("--devices, --budget and --deadline are for --search")
    recipe, found, made = _planned(arguments, device, cloud=cloud)
    if made is None:
        raise WrongInput("\n".join(found.wrong))
    _show(recipe, made, found, as_json=as_json, keep=keep)
    if found.wrong:
        raise WrongInput("\n".join(found.wrong))
    fits = all("does not fit" not in one.message for one in made.findings if one.about == "memory")
    return EXIT_DONE if fits else EXIT_FAILED


def _correct(run: str | None, device: str | None, *, alone: bool) -> int:
    """Learn from a run, or take away what was learned about a device. `alone`: nothing else is
    given.
    """
    from ingot.base.errors import EXIT_DONE, WrongInput
    from ingot.base.progress import say
    from ingot.cli.console import run_folder
    from ingot.plan.devices.learned import forget, known_names
    from ingot.plan.learn import learn

    if not alone or (run is not None and device is not None):
        raise WrongInput(
            "--learn RUN and --forget DEVICE are given alone, without a recipe or another option"
        )
    if device is not None:
        if not forget(device):
            known = ", ".join(known_names()) or "nothing about any device"
            raise WrongInput(f"nothing was learned about {device}; known is {known}")
        say(f"forget: {device} is as it was measured or guessed before")
        return EXIT_DONE
    assert run is not None
    found = learn(run_folder(run))
    factor = found.correction.factor.text("{:.3g}".format)
    say(
        f"learn: a step took {found.came.text('{:.3g}'.format)} s, planned"
        f" {found.planned.text('{:.3g}'.format)}"
    )
    say(
        f"learn: plans for {found.device} take {factor} times as long as without it;"
        f" stored in {found.path}; `ingot plan --forget {found.device}` takes it away"
    )
    return EXIT_DONE


def _planned(
    arguments: list[str], device: str | None, *, cloud: bool
) -> tuple[Recipe, Findings, RunPlan | None]:
    """The plan, and what the checks of the recipe found; no plan if nothing can come of it."""
    from ingot.base.errors import WrongInput
    from ingot.cli.check.recipe import findings, read_checked
    from ingot.plan.assemble import make_plan
    from ingot.plan.automatic import planned_layout
    from ingot.plan.checks.finding import PlanFinding
    from ingot.plan.place import place_of
    from ingot.plan.unknown import Unknown

    recipe, values = read_checked(arguments, "train")
    found = findings(recipe, values)
    recipe = recipe.at("train")
    place, model = place_of(recipe, device), _model(recipe, values)
    try:
        laid_out, told = planned_layout(recipe, place, model, searching=True)
        made = make_plan(laid_out, place, model)
    except WrongInput as error:
        found.ask(_refuse, error)
        found.wrong = list(dict.fromkeys(found.wrong))
        return recipe, found, None
    if isinstance(made.sample, Unknown) and made.sample.wrong and not found.wrong:
        found.wrong.append(made.sample.needs)
    more = ask_cloud(recipe, place, ask=cloud)
    if told:
        more.insert(0, PlanFinding("known", "parallel", told))
    return recipe, found, replace(made, findings=[*made.findings, *more])


def _search(
    arguments: list[str],
    device: str | None,
    devices: str | None,
    budget: float | None,
    deadline: str | None,
    *,
    as_json: bool,
) -> int:

    from ingot.base.errors import EXIT_DONE, EXIT_FAILED, WrongInput
    from ingot.cli.check.recipe import read_checked
    from ingot.cli.views.plan_table import show_search
    from ingot.config.sections.launch import parse_duration
    from ingot.plan.choose import Limits, choice_json, choose
    from ingot.plan.place import place_of

    recipe, values = read_checked(arguments, "train")
    recipe = recipe.at("train")
    try:
        seconds = None if deadline is None else float(parse_duration(deadline))
    except ValueError as error:
        raise WrongInput(f"--deadline {deadline} {error}") from None
    if budget is not None and not budget > 0:
        raise WrongInput(f"--budget {budget:g}: give US dollars, more than 0, such as 500")
    if seconds is not None and not seconds > 0:
        raise WrongInput(f"--deadline {deadline}: give a time, more than 0, such as 24h")
    place, model = place_of(recipe, device), _model(recipe, values)
    choice = choose(recipe, place, model, devices, Limits(budget, seconds))
    if as_json:
        print(json.dumps(choice_json(choice), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        show_search(choice)
    return EXIT_DONE if choice.within else EXIT_FAILED


def _refuse(error: Exception) -> None:
    raise error


def _model(recipe: Recipe, values: Values) -> ModelKnown:
    from ingot.cli.check.training import RANDOM, check_model
    from ingot.config.values import Findings
    from ingot.plan.assemble import ModelKnown

    # What is wrong with it was found by the checks of the recipe.
    config = check_model(recipe, Findings(values))
    if config is None:
        return ModelKnown(None, random=False)
    random = bool(config.pop(RANDOM))
    return ModelKnown(config, random)


def ask_cloud(recipe: Recipe, place: PlannedPlace, *, ask: bool) -> list[PlanFinding]:
    """Whether the project may have the machines, if the cloud may be asked."""
    from ingot.base.errors import IngotError
    from ingot.plan.checks.finding import PlanFinding

    about = "launch.machine"
    if not place.rented:
        return []
    if not ask:
        message = "quota, and whether the region has these machines; --cloud asks"
        return [PlanFinding("not checked", about, message)]
    from ingot.cloud.doctor.context import check_context, run_checks
    from ingot.cloud.doctor.machines import quotas, types

    try:
        site = check_context(recipe)
        told = run_checks(site, (("machine types", types), ("quota", quotas)))
    except IngotError as error:
        return [PlanFinding("not checked", about, f"quota and machine types: {error}")]
    kinds = {True: "known", False: "warning", None: "not checked"}
    return [
        PlanFinding(kinds[one.ok], about, f"{one.what}: {one.found}")  # type: ignore[arg-type]
        for one in told
    ]


def _show(recipe: Recipe, made: RunPlan, found: Findings, *, as_json: bool, keep: bool) -> None:
    from ingot.base.masking import keys_hidden, knobs_hidden
    from ingot.base.progress import say
    from ingot.base.storage import write_atomic
    from ingot.cli.views.plan_table import show_plan
    from ingot.plan.as_json import plan_json
    from ingot.plan.assemble import RECORDED

    content = plan_json(made)
    content["knobs"] = knobs_hidden(recipe.select(RECORDED))
    content["wrong"] = list(found.wrong)
    content["not_checked"] = list(dict.fromkeys(found.unknown))
    content = keys_hidden(content)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if as_json:
        print(text, end="")
    else:
        show_plan(made)
        for line in content["not_checked"]:
            say(f"not checked: {line}")
    if keep:
        recipe.folder.reports.mkdir(parents=True, exist_ok=True)
        write_atomic(recipe.folder.plan, text)
        say(f"kept as {recipe.folder.plan}")


def tell_dry_run(recipe: Recipe, values: Values) -> None:
    """The part of a plan that needs no trace, on stderr: a trace takes seconds, and a dry run is to
    be quick and to need no torch.
    """
    from ingot.base.errors import IngotError
    from ingot.base.progress import say
    from ingot.cli.views.plan_table import short_plan
    from ingot.plan.assemble import make_plan
    from ingot.plan.automatic import planned_layout
    from ingot.plan.place import place_of

    recipe = recipe.at("train")
    place, model = place_of(recipe), _model(recipe, values)
    try:
        laid_out, told = planned_layout(recipe, place, model, searching=False)
        made = make_plan(laid_out, place, model, traced=False)
    except IngotError as error:
        say(f"plan: none can be made: {error}")
        return
    if told:
        say(f"plan: {told}")
    for line in short_plan(made):
        say(f"plan: {line}")
