"""Options of other libraries as overrides of a recipe, for errors about unknown options.

`meant_overrides` translates options of torch's optimizers. `translated` also knows the options of Muon, SOAP and
Distributed Shampoo as their authors' code has them. There, equal names can set different fields: betas[1] of SOAP is
also the decay of the factor matrices, and betas[1] of Distributed Shampoo is not the decay of the grafting. An option
whose meaning for the recipe is not certain has no translation.

docs/from-torch.md shows the same translations, and a test (tests/optimizers/test_other_options.py) compares both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eigengraft.errors import RecipeError

from .recipe.loading import load_recipe
from .recipe.recipe import Recipe, Route

_MOMENTS = {
    "momentum": ("first_moment",),
    "beta1": ("first_moment",),
    "beta2": ("second_moment",),
    "betas": ("first_moment", "second_moment"),
}
"""Options of torch's optimizers that are decays of moments, with the roles of the slots that store these moments."""
_ITERATION = {"ns_steps": "steps", "backend_steps": "steps", "ns_coefficients": "coefficients"}
"""Options of Muon in torch and in its author's code, with the fields of the solver `newton_schulz` that mean the same.
"""
_OFF_IN_SOAP = {"normalize_grads": False, "data_format": "channels_first"}
"""Options of the authors' SOAP, with their defaults. An option with its default has no effect, so that a recipe of SOAP
needs no override for it."""
_GRAFTS: Mapping[str, Mapping[str, Any]] = {
    "Adam": {"beta": "beta2", "eps": "epsilon"},
    "RMSprop": {"beta": "beta2", "eps": "epsilon", "bias_correction": False},
    "AdaGrad": {"beta": 1.0, "eps": "epsilon"},
}
"""Fields of the stage `rms` for each grafting of Distributed Shampoo, by the beginning of its class's name. A text is
the name of an attribute of the grafting."""
ON_PAGE = frozenset(
    re.findall(
        r"\w+",
        """
    abs_epsilon average_grad batch_axis_name best_effort_memory_usage_reduction best_effort_shape_interpretation
    beta1 beta2 beta3 betas block_size clip_by_scaled_gradient_norm communicate_params communication_dtype
    compression_rank concurrency_config correct_bias corrected_eigenvalues_dtype dampening data_format
    decay_preconditioning_compute_steps decoupled_learning_rate decoupled_weight_decay diagonal_epsilon
    distributed_config drop_weighting_factor_on_gsquare eigendecomposition_offload_device eigh
    end_preconditioning_compute_steps eps epsilon eval_coeff_lr_power eval_interp_coeff exponent_override
    factor_matrix_dtype factor_matrix_eigenvectors_dtype frequent_directions generate_fd_metrics
    generate_training_metrics graft_type grafting_config ignored_basis_change_dims inv_factor_matrix_dtype
    inv_root_mode inverse_exponent_override inverse_failure_threshold iterate_averaging_config lobpcg_max_iter
    lobpcg_topk_precondition matrix_eps matrix_epsilon max_iterations max_precond_dim max_preconditioner_dim
    merge_dims merge_small_dims_block_size min_lowbit_size momentum moving_average_for_momentum nesterov
    normalize_grads ns_coefficients ns_steps num_devices_for_pjit num_tolerated_failed_amortized_computations
    num_trainers_per_group
    order peak_lr perturb_before_computation prec_bits prec_compute_steps prec_maxorder precision
    precondition_1d precondition_frequency preconditioner_config preconditioner_partition_spec
    preconditioning_compute_steps precondtioner_type quan_blocksize rank_atol rank_rtol rect_t1 rect_t2
    rel_epsilon relative_matrix_epsilon reset_preconditioner retry_double_precision reuse_preconditioner
    scale_by_dims_fn scale_by_nuclear_norm shampoo_beta shampoo_pt2_compile_config shard_optimizer_states
    skip_preconditioning_dim_size_gt skip_preconditioning_rank_lt start_prec_step start_preconditioning_step
    stat_compute_steps stat_decay statistics_compute_steps statistics_partition_spec
    target_parameter_dimensionality tensordot_precision tolerance trace_scaling_exponent train_interp_coeff
    use_bias_correction use_decoupled_weight_decay use_nesterov use_pin_memory use_symmetric_packing
    use_trace_scaling weight_decay_type
        """,
    )
)
"""Options of Distributed Shampoo, DALL-E mini, 4-bit Shampoo, SOAP and Muon that docs/from-torch.md explains. Errors
about them name this page."""


def meant_overrides(key: str, value: Any, rule: Recipe | Route, at: str = "") -> dict[str, Any]:
    """Translate an option of torch's optimizers into overrides of a recipe: a mapping {dotted path: value}.

    `momentum` and `betas` become the decays of first and second moments. Any other option becomes an override of each
    field of a stage that has the same name as the option.

    rule: the recipe, or one of its routes.
    at: path of the rule in the recipe, "" for the recipe itself.
    """
    roles = _MOMENTS.get(key, ())
    values = value if isinstance(value, (tuple, list)) and len(value) == len(roles) else [value] * len(roles)
    given = dict(zip(roles, values, strict=True))
    found = {path: given[role] for path, role in _decays(rule, at) if role in given}
    return found | {f"{path}.{key}": value for path, stage in _stages(rule, at) if key in type(stage).model_fields}


def _stages(rule: Recipe | Route, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, stage) of every stage of a rule, with the dotted path by which an override finds the stage.

    at: path of the rule in the recipe, "" for the recipe itself.
    """
    sums = list[str]()
    for path, stage in rule.stages(at):
        written = re.sub(r"\.after_(direction|magnitude)\.", ".after.", path)  # `graft` has two copies of `after`
        for outer in reversed(sums):  # an inner `sum` first, so that the prefix of the outer one is unchanged
            written = re.sub(rf"^({re.escape(outer)})\.([^.]+)\.", r"\1.paths.\2.stages.", written)
        if stage.kind == "sum":
            sums.append(path)
        yield written, stage


def _decays(rule: Recipe | Route, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field `beta`, role of the slot) for each slot of each stage that has a `beta`.

    at: path of the rule in the recipe, "" for the recipe itself.
    """
    for path, stage in _stages(rule, at):
        for slot in stage.slots((2, 2)).values() if "beta" in type(stage).model_fields else ():
            yield f"{path}.beta", slot.role


def translated(options: Mapping[str, Any], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Translate options of other libraries into overrides of a recipe: {option: {dotted path: value}}.

    The mapping of an option is empty if the option has no certain meaning for the recipe. The recipe accepts all
    overrides of the result together.
    """
    found, accepted = dict[str, dict[str, Any]](), dict[str, Any]()
    for key in options:
        overrides = _overrides(key, options, recipe)
        try:
            load_recipe(recipe, accepted | overrides)
        except RecipeError:  # the recipe has another kind of stage there, or refuses a value
            overrides = {}
        found[key] = overrides
        accepted |= overrides
    return found


def superfluous(options: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return the options of SOAP and Distributed Shampoo that need no override, because the recipe already has their
    effect.

    In the authors' code of SOAP a negative `shampoo_beta` means that `betas[1]` is the decay of both the second moments
    and the factor matrices. Such a `shampoo_beta` needs no override in two cases: `betas` or `beta2` is given too, so
    that `translated` sets both decays, or both decays are equal in the recipe.

    options: all options of the call, by name.
    """
    path, stage = _soap_stage(recipe)
    if stage is None:
        no_graft = _factored(recipe) and all(own.kind != "graft" for _, own in _stages(recipe))
        return ["grafting_config"] if no_graft and options.get("grafting_config", 0) is None else []
    off = _OFF_IN_SOAP | ({} if recipe.blocking.merge else {"merge_dims": False})
    found = [key for key, value in off.items() if key in options and options[key] == value]
    second = [own for where, own in _stages(recipe) if where.startswith(f"{path}.inner.") and own.kind == "rms"]
    same = options.keys() & {"betas", "beta2"} or [own.beta for own in second] == [stage.statistic.beta]
    own_decay = options.get("shampoo_beta")
    unset = isinstance(own_decay, (int, float)) and own_decay < 0
    return [*found, *(["shampoo_beta"] if unset and same else [])]


def _factored(recipe: Recipe) -> list[tuple[str, Any]]:
    """Return (path, stage) of each stage with a statistic, in the order of the recipe.

    The list is empty if the first of these stages only prepares the gradient of an Adam, as in 4-bit Shampoo. The
    options of SOAP and of Distributed Shampoo have no certain meaning for such a recipe.
    """
    found = [(path, stage) for path, stage in _stages(recipe) if "statistic" in type(stage).model_fields]
    return [] if found and ".before." in found[0][0] else found


def _soap_stage(recipe: Recipe) -> tuple[str, Any]:
    """Return (path, stage) of the stage `eigenbasis` of a recipe that is SOAP; ("", None) for other recipes."""
    match _factored(recipe):
        case [(path, stage)] if stage.kind == "eigenbasis" and stage.transport != "none":
            return path, stage
    return "", None


def momentum_path(recipe: Recipe) -> str | None:
    """Return the path of the recipe's field with the decay of the first moment; None if no single field is certain."""
    return next(iter(_overrides("beta1", {"beta1": 0.9}, recipe)), None)


def _overrides(key: str, options: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    if key in _ITERATION:
        solvers = {path: getattr(stage, "solver", None) for path, stage in _stages(recipe)}
        found_at = [f"{path}.solver" for path, own in solvers.items() if getattr(own, "kind", "") == "newton_schulz"]
        value = [*options[key]] if isinstance(options[key], tuple) else options[key]
        return {f"{found_at[0]}.{_ITERATION[key]}": value} if len(found_at) == 1 else {}
    at, soap = _soap_stage(recipe)
    if soap is not None:
        return _of_soap(key, options, recipe, at)
    factored = _factored(recipe)
    if not factored:
        found = [role for _, role in _decays(recipe)]
        sums = any(stage.kind == "sum" for _, stage in recipe.stages())  # its moments have decays of their own
        certain = not sums and all(found.count(role) == 1 for role in _MOMENTS.get(key, ()))
        return meant_overrides(key, options[key], recipe) if certain or key not in _MOMENTS else {}
    path, stage = factored[0]
    if len(factored) == 1 and getattr(stage.statistic, "kind", None) == "gram":
        if stage.kind == "shampoo" and any(".graft.after." in own for own, _ in _stages(recipe)):
            return _of_shampoo_in_jax(key, options, recipe, path)
        if stage.kind in ("eigenbasis", "shampoo"):
            return _of_shampoo(key, options, recipe, path)
    # `betas` and `beta2` are not translated: it is unknown whether they are also meant for the statistic's decay
    return {} if key in ("betas", "beta2") else meant_overrides(key, options[key], recipe)


def _same(fields: Mapping[str, Sequence[str]], key: str, value: Any) -> dict[str, Any]:
    """Return overrides that give the value of an option to all fields with the meaning of this option.

    fields: for each option, the dotted paths of these fields. `betas` is missing, because its two values are those of
        `beta1` and `beta2`.
    key: name of the option. The result is empty if `fields` does not have it.
    """
    if key != "betas":
        return dict.fromkeys(fields.get(key, ()), value)
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not pair or not fields["beta1"] or not fields["beta2"]:
        return {}
    return dict.fromkeys(fields["beta1"], value[0]) | dict.fromkeys(fields["beta2"], value[1])


def _of_soap(key: str, options: Mapping[str, Any], recipe: Recipe, at: str) -> dict[str, Any]:
    """Translate an option of the authors' SOAP into overrides {dotted path: value}; {} without a certain meaning.

    key: name of the option.
    options: all options of the call, by name. Some options change the meaning of others.
    at: path of the stage `eigenbasis`.
    """
    value, whole = options[key], recipe.blocking.size is None
    first, second = ([path for path, role in _decays(recipe) if role == f"{n}_moment"] for n in ("first", "second"))
    inside = [path.removesuffix(".beta") for path in (*first, *second) if path.startswith(f"{at}.inner.")]
    if not any(path.startswith(f"{at}.inner.") for path in second):
        second = []  # another method in the eigenbasis, such as the sign
    own = options.get("shampoo_beta", -1.0)
    statistic = [f"{at}.statistic.beta"]
    fields = {
        "beta1": first,
        "momentum": first,
        "beta2": [*second, *statistic] if second and _is_number(own) and own < 0 else second,
        "shampoo_beta": statistic if _is_number(own) and own >= 0 else [],
        "precondition_frequency": [f"{at}.refresh.steps"],
        "max_precond_dim": [f"{at}.statistic.axes.max_size"] if whole else [],
        "precondition_1d": [f"{at}.statistic.axes.vectors"],
        "correct_bias": [f"{path}.bias_correction" for path in inside],
    }
    if key == "merge_dims":
        merge = {"merge": options.get("max_precond_dim", 10000), "merge_from": "first"}
        # The authors' code merges the axes of tensors, and preconditions vectors only with `precondition_1d`. Without
        # it, a tensor that becomes a vector has no basis. Only a route can express this, so there is no override.
        certain = value is True and options.get("precondition_1d") is True and whole
        return {"blocking": merge, f"{at}.statistic.axes.vectors": True} if certain else {}
    found = _same(fields, key, value)
    if key == "correct_bias" and value is False:
        stages = dict(_stages(recipe))
        found |= {f"{path}.eps_on": "corrected" for path in inside if stages[path].kind == "rms"}
    return found if key in fields or key == "betas" else meant_overrides(key, value, recipe)


def _of_shampoo(key: str, options: Mapping[str, Any], recipe: Recipe, at: str) -> dict[str, Any]:
    """Translate an option of Distributed Shampoo in PyTorch into overrides; {} without a certain meaning.

    key: name of the option.
    options: all options of the call, by name. Some options change the meaning of others.
    at: path of the stage with the factor matrices.
    """
    value, stages = options[key], dict(_stages(recipe))
    filters = [path for path, stage in stages.items() if stage.kind == "momentum"]
    inside = [path for path, stage in stages.items() if path.startswith(f"{at}.inner.") and stage.kind == "rms"]
    graft = at.partition(".direction.")[0] if ".direction." in at else None
    starts = [f"{at}.refresh.start", *([f"{graft}.start"] if graft else [])]
    follows = options.get("start_preconditioning_step", -1) == -1  # then the start is the frequency
    relative = not inside and stages[at].solver.model_dump().get("relative", False)
    corrected = [*filters, *([] if _beta2(options) == 1 else [*inside, f"{at}.statistic"])]  # a sum has no bias
    fields = {
        "beta1": [f"{path}.beta" for path in filters],
        "beta2": [f"{path}.beta" for path in (*inside, f"{at}.statistic")],
        "beta3": [f"{path}.beta3" for path in filters],
        "epsilon": [] if relative else [f"{path}.eps" for path in inside or [f"{at}.solver"]],
        "precondition_frequency": [f"{at}.refresh.steps", *(starts if follows else [])],
        "start_preconditioning_step": [] if follows else starts,
        "max_preconditioner_dim": ["blocking.size", "blocking.merge"],
        "use_bias_correction": [f"{path}.bias_correction" for path in corrected],
    }
    if key == "use_decoupled_weight_decay":
        return {"weight_decay.kind": "decoupled" if value else "l2"}
    if key == "weight_decay_type":
        return {"weight_decay.kind": str(getattr(value, "name", value)).lower()}
    if key in ("momentum", "use_nesterov", "dampening"):
        if not options.get("momentum"):
            return {}
        last = {"kind": "heavy_ball", "beta": options["momentum"]}
        more = {"nesterov": options.get("use_nesterov"), "dampening": options.get("dampening")}
        return {"after_decay": [last | {field: one for field, one in more.items() if one}]}
    if key == "grafting_config":
        magnitude = _magnitude(value)
        return {f"{graft}.magnitude": magnitude} if graft and magnitude else {}
    return _same(fields, key, value)


def _magnitude(grafting: Any) -> dict[str, Any] | None:
    """Return the declaration of the stage that computes the norms of a grafting of Distributed Shampoo.

    The result is a stage `identity` or `rms`, or None if it is not certain that one of these stages computes the same.

    grafting: an object such as `AdamGraftingConfig`.
    """
    name = type(grafting).__name__
    if name.startswith("SGD"):
        return {"kind": "identity"}
    given = next((fields for prefix, fields in _GRAFTS.items() if name.startswith(prefix)), None)
    if given is None or getattr(grafting, "drop_weighting_factor_on_gsquare", False):
        return None
    found: dict[str, Any] = {"kind": "rms"}
    return found | {
        field: getattr(grafting, one, None) if isinstance(one, str) else one for field, one in given.items()
    }


def _of_shampoo_in_jax(key: str, options: Mapping[str, Any], recipe: Recipe, at: str) -> dict[str, Any]:
    """Translate an option of Distributed Shampoo in JAX into overrides; {} without a certain meaning.

    The options apply to all parameters, so that decays are overridden in the recipe's own update and in all routes.

    key: name of the option.
    options: all options of the call, by name.
    at: path of the stage `shampoo`.
    """
    value, rules = options[key], recipe.rules().items()
    decays = [decay for where, rule in rules for decay in _decays(rule, where)]
    first, second = ([path for path, role in decays if role == f"{n}_moment"] for n in ("first", "second"))
    means = [f"{at}.statistic.beta", *second]
    fields = {
        "beta1": first,
        "momentum": first,
        "beta2": means,
        "diagonal_epsilon": [f"{path.removesuffix('.beta')}.eps" for path in second],
        "matrix_epsilon": [f"{at}.solver.eps", f"{at}.statistic.initial"],
        "start_preconditioning_step": [f"{at.partition('.direction.')[0]}.start"],
        "preconditioning_compute_steps": [f"{at}.refresh.steps"],
        "statistics_compute_steps": [f"{at}.statistic.interval"],
        "inverse_failure_threshold": [f"{at}.solver.max_error"],
        "block_size": ["blocking.size"],
        "merge_small_dims_block_size": ["blocking.merge"],
        "nesterov": [f"{path.removesuffix('.beta')}.nesterov" for path in first],
    }
    if key == "start_preconditioning_step" and _is_number(value):
        value += 1  # the code counts steps from 0
    found = _same(fields, key, value)
    if found and key in ("betas", "beta2") and _beta2(options) == 1:  # a sum has no bias to correct
        found |= {f"{path.removesuffix('.beta')}.bias_correction": True for path in means}
    return found


def _beta2(options: Mapping[str, Any]) -> Any:
    """Return the decay of second moments in the options `betas` and `beta2`; None if neither gives one."""
    pair = options.get("betas")
    return pair[1] if isinstance(pair, (tuple, list)) and len(pair) == 2 else options.get("beta2")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
