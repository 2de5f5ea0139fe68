"""What users write into recipes (YAML), and the paths and values that the error must name.

The model has two layers: 8x6, 6x4.
"""

RECIPES: tuple[tuple[str, tuple[object, ...]], ...] = (
    # names of fields
    ("{update: rms, learning_rate: 1}", ("learning_rate", "lr", 1)),
    ("{update: rms, wd: 0.1}", ("wd", "weight_decay")),
    ("{update: [{kind: momentum, betas: [0.9, 0.99]}]}", ("update.momentum.betas", "beta")),
    (
        "{update: [{kind: momentum, momentum: 0.9}]}",
        ("update.momentum.momentum",),
    ),
    ("{update: [{kind: rms, epsilon: 1e-8}]}", ("update.rms.epsilon", "eps")),
    ("{update: [{kind: spectral, steps: 5}]}", ("update.spectral.steps", "solver.steps")),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], statistic: {kind: gram, max_size: 1024}}]}",
        ("update.eigenbasis.statistic.max_size", "axes.max_size"),
    ),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], refresh: {kind: every, step: 10}}]}",
        ("update.eigenbasis.refresh.step", "steps", 10),
    ),
    ("{update: [{kind: split, inner: [momentum]}]}", ("update.split.inside",)),
    ("{update: momentum, blocking: {sise: 128}}", ("blocking.sise", "size")),
    # stages that do not fit each other, or themselves
    ("{update: {kind: trust, inner: momentum, floor: 0.9, cap: 0.5}}", ("update.trust.floor", 0.5)),
    (
        "{update: {kind: partner_basis, inner: spectral}}",
        ("update.partner_basis",),
    ),
    ("{update: {kind: transform, inner: momentum}}", ("update.transform.before",)),
    ("{update: {kind: sirf, moments: layer}}", ("update.sirf.axes", "{vectors: false}", "moments: layer")),
    # what belongs elsewhere
    (
        "{update: momentum, schedule: cosine}",
        ("schedule",),
    ),
    ("{update: momentum, imports: [own.py]}", ("imports",)),
    ("{update: momentum, steps: 100}", ("steps",)),
    ("{update: momentum, grad_clip: 1.0}", ("grad_clip",)),
    ("{update: momentum, foreach: true}", ("foreach",)),
    (
        "{update: [{kind: rms, storage: int8}]}",
        ("update.rms.storage",),
    ),
    ("{update: [{kind: momentum, lr: 0.1}]}", ("update.momentum.lr",)),
    ("{base: soap, update.eigenbasis.refresh.steps: 1}", ("refresh.steps", "set")),
    ("{base: soap, overrides: [lr=1]}", ("overrides", "set: {dotted.path: value}")),
    ("{update: sign, routes: [{name: a, update: sign, lr: 0.1}]}", ("routes.a.lr", "lr_ratio")),
    ("{update: sign, routes: [{name: a, recipe: adamw}]}", ("routes.a.recipe", "update")),
    # kinds
    ("{update: eigh}", ("update.eigh", "eigh", "basis_solver", "root_solver")),
    ("{update: newton_schulz}", ("newton_schulz", "polar_solver")),
    ("{update: my_stage}", ("update.my_stage", "my_stage", "--import", "FILE.py")),
    ("{update: RMS}", ("update.RMS", "RMS", "rms")),
    ("{update: soap}", ("update.soap", "base: soap")),
    ("{update: {kind: projected, rank: 4, inner: soap}}", ("update.soap",)),
    (
        "{update: {kind: sum, paths: [{name: a, stages: [muon]}]}}",
        ("update.muon",),
    ),
    (
        "{update: {kind: graft, direction: sign, magnitude: rms, after: [soap]}}",
        ("update.soap",),
    ),
    (
        "{update: [momentum, {kind: eigenbasis, inner: adam}]}",
        ("update.adam",),
    ),
    (
        "{update: [{kind: spectral, solver: eigh}]}",
        ("update.spectral.solver", "polar_solver", "eigh"),
    ),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], solver: coupled_newton}]}",
        ("update.eigenbasis.solver", "basis_solver", "coupled_newton", "root_solver"),
    ),
    ("{update: momentum, constraints: clip_norm}", ("clip_norm",)),
    ("{update: momentum, averaging: ewma}", ("averaging", "ewma", "ema")),
    ("{update: momentum, weight_decay: l3}", ("weight_decay", "l3", "l2")),
    ("{update: momentum, view: heads}", ("view", "heads")),
    ("{update: rms, storage: {second_moment: int7}}", ("storage.second_moment", "quantizer", "int7")),
    # forms
    ("{update: {momentum: {beta: 0.9}}}", ("update", "{kind: momentum, ...}")),
    ("{update: {kind: [momentum, rms]}}", ("update", "momentum", "rms")),
    ("{update: [[momentum, rms]]}", ("update.0",)),
    ("{update: [momentum, null]}", ("update.1", "None")),
    ("{update: []}", ("update", "identity")),
    ("{update: [{kind: eigenbasis, inner: []}]}", ("update.eigenbasis.inner", 1)),
    ("{update: [{kind: rms}, {kind: rms}]}", ("update", "rms")),
    ("{update: momentum, weight_decay: 0.1}", ("decoupled", "weight_decay", 0.1)),
    ("{update: momentum, blocking: 128}", ("blocking", 128)),
    ("{update: momentum, routes: adam}", ("routes", "default", "adam")),
    (
        "{update: momentum, routes: [{name: a, update: sign, match: head}]}",
        ("routes.a.match",),
    ),
    ("{update: rms, storage: int8}", ("storage", "int8")),
    ("{update: momentum, line_search: true}", ("line_search", "True")),
    ("{update: momentum, sam: 0.05}", ("sam", 0.05)),
    ("{update: [{kind: momentum, beta: {start: 0.9, end: 1}}]}", ("update.momentum.beta",)),
    ("{update: [{kind: momentum, beta: {from: 0.9, to: 0.99}}]}", ("update.momentum.beta",)),
    ("{base: soap, set: 3}", ("set", 3)),
    ("{base: soap, set: {refresh.steps: 1}}", ("refresh", "update.eigenbasis.refresh")),
    (
        "{base: saop}",
        ("base", "saop", "soap"),
    ),
    # values
    ("{update: momentum, lr: -1}", ("lr", 0, -1)),
    ('{update: momentum, lr: "1e-3"}', ("lr", "1e-3")),
    ("{update: [{kind: momentum, beta: 1.0}]}", ("update.momentum.beta", 1)),
    ("{update: [{kind: scale, rule: match_rm}]}", ("update.scale.rule", "match_rms", "match_rm")),
    (
        "{update: [{kind: shampoo, exponent: -0.25}]}",
        ("update.shampoo.exponent", 0, "1/4"),
    ),
    (
        "{update: [{kind: shampoo, solver: newton_db, exponent: 1/8}]}",
        ("update.shampoo.exponent", "newton_db", "1/2", "1/4", "1/8", "exponent", "solver"),
    ),
    (
        "{update: [{kind: shampoo, solver: cholesky}]}",
        ("update.shampoo.exponent", 1, "1/4", "exponent", "newton_db"),
    ),
    ("{update: momentum, routes: [default, default]}", ("adam",)),
    ('{update: sign, routes: [{name: a, update: sign, match: {name: "*.bias"}}]}', ("match.name",)),
    ("{update: sign, routes: [{name: a, update: sign, match: {role: hed}}]}", ("routes.a.match.role.hed", "hed")),
    # what has no effect
    (
        "{update: rms, storage: {basis: int8}}",
        ("storage", "basis"),
    ),
    (
        "{update: rms, storage: {second_moment: {kind: orthogonal, inner: int4}}}",
        ("storage.second_moment",),
    ),
    (
        "{base: soap, storage: {first_moment: cholesky}}",
        ("storage.first_moment",),
    ),
    ("{update: rms, storage: {update.rms/vv: int8}}", ("storage", "update.rms/v")),
    (
        "{update: momentum, expect: {rms: '>= 90% of parameters'}}",
        ("expect",),
    ),
    ("{update: sign, view: {kind: matrices}}", ("view",)),
    (
        "{update: sign, routes: [{name: a, update: rms, match: {name: nothing}}]}",
        ("routes.a",),
    ),
    ("{}", ("update",)),
    ("{update: rmss}", ("update.rmss", "rmss", "rms", "adafactor")),
    ("{update: [{beta: 0.9}]}", ("update", "kind", "{'beta': 0.9}")),
    ("{update: 3}", ("update", 3)),
    ("{update: {kind: null}}", ("update", "None")),
    ("{update: eigenbasis}", ("update.eigenbasis.inner",)),
    ("{update: {kind: graft, direction: sign}}", ("update.graft.magnitude",)),
    ("{update: {kind: rms, betta: 0.9}}", ("update.rms.betta", "beta", 0.9)),
    ("{update: [sign, {kind: rms, beta: 2}]}", ("update.rms.beta", 1, 2)),
    (
        "{update: {kind: eigenbasis, inner: [momentum, {kind: rms, beta: -1}]}}",
        ("update.eigenbasis.inner.rms.beta", 0, -1),
    ),
    ("{update: {kind: rms, beta: '0.9'}}", ("update.rms.beta", "0.9")),
    ("{update: {kind: rms, beta: true}}", ("update.rms.beta", "True")),
    ("{update: {kind: rms, eps: .inf}}", ("update.rms.eps", "inf")),
    ("{update: {kind: rms, source: grad}}", ("update.rms.source", "gradient", "direction", "grad")),
    ("{update: [rms, rms]}", ("update", "rms", "name")),
    ("{update: {kind: rms, name: 'a.b'}}", ("a.b",)),
    ("{update: {kind: shampoo, refresh: {kind: every, steps: 0}}}", ("update.shampoo.refresh.steps", 1, 0)),
    ("{update: {kind: shampoo, refresh: 10}}", ("update.shampoo.refresh", "cadence", 10)),
    ("{update: {kind: shampoo, exponent: x}}", ("update.shampoo.exponent", "1/4", "x")),
    (
        "{update: {kind: shampoo, solver: coupled_newton, exponent: '1/100'}}",
        ("update.shampoo.exponent", "coupled_newton", "1/100", "exponent", "solver"),
    ),
    ("{update: {kind: eigenbasis, inner: [momentum, shampoo]}}", ("update.eigenbasis.inner.shampoo",)),
    (
        "{update: {kind: shampoo, solver: power_qr}}",
        ("update.shampoo.solver", "root_solver", "power_qr", "coupled_newton"),
    ),
    ("{update: rms, weight_decay: {kind: l2, rate: -1}}", ("weight_decay.rate", -1)),
    ("{update: rms, blocking: {size: 0}}", ("blocking.size", 1, 0)),
    ("{update: rms, failure: {nonfinite: panic}}", ("failure.nonfinite", "skip", "raise", "ignore", "panic")),
    ("{update: rms, routes: defalt}", ("routes", "defalt")),
    ("{update: rms, routes: [defalt]}", ("routes", "default", "defalt")),
    ("{update: rms, routes: [{update: sign}]}", ("routes",)),
    ("{update: rms, routes: [{name: a, update: {kind: rms, beta: 2}}]}", ("routes.a.update.rms.beta", 2)),
    ("{update: rms, routes: [{name: a, update: sign}, {name: a, update: sign}]}", ("a",)),
    ("{update: rms, routes: [{name: a, update: sign, match: {name: '('}}]}", ("routes.a.match.name", "(")),
    (
        "{update: rms, routes: [{name: a, update: sign, match: {role: hed}}]}",
        ("routes.a.match.role.hed", "embedding", "hed"),
    ),
    ("{schema: 99, update: rms}", ("schema", 1, 99)),
)
