"""What users write into recipes (YAML), and the words that the error must hold. The model has two layers: 8x6, 6x4."""

RECIPES = (
    # names of fields
    ("{update: rms, learning_rate: 1}", "learning_rate: unknown field (did you mean 'lr'?), got 1"),
    ("{update: rms, wd: 0.1}", "wd: unknown field (did you mean 'weight_decay'?)"),
    ("{update: [{kind: momentum, betas: [0.9, 0.99]}]}", "update.momentum.betas: unknown field (did you mean 'beta'?)"),
    (
        "{update: [{kind: momentum, momentum: 0.9}]}",
        "update.momentum.momentum: unknown field (there are: name, kind, beta",
    ),
    ("{update: [{kind: rms, epsilon: 1e-8}]}", "update.rms.epsilon: unknown field (did you mean 'eps'?)"),
    ("{update: [{kind: spectral, steps: 5}]}", "update.spectral.steps: unknown field (did you mean 'solver.steps'?)"),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], statistic: {kind: gram, max_size: 1024}}]}",
        "update.eigenbasis.statistic.max_size: unknown field (did you mean 'axes.max_size'?)",
    ),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], refresh: {kind: every, step: 10}}]}",
        "update.eigenbasis.refresh.step: unknown field (did you mean 'steps'?), got 10",
    ),
    ("{update: [{kind: split, inner: [momentum]}]}", "update.split.inside: required, got nothing"),
    ("{update: momentum, blocking: {sise: 128}}", "blocking.sise: unknown field (did you mean 'size'?)"),
    # stages that do not fit each other, or themselves
    (
        "{update: {kind: trust, inner: momentum, floor: 0.9, cap: 0.5}}",
        "update.trust.floor: it must be at most",
    ),
    (
        "{update: {kind: partner_basis, inner: spectral}}",
        "update.partner_basis: factors must have two axes",
    ),
    ("{update: {kind: transform, inner: momentum}}", "update.transform.before: required, got nothing"),
    ("{update: {kind: sirf, moments: layer}}", "update.sirf.axes: {vectors: false} is required with `moments: layer`"),
    # what belongs elsewhere
    (
        "{update: momentum, schedule: cosine}",
        "schedule: unknown field; it belongs to an experiment, or to the training",
    ),
    ("{update: momentum, imports: [own.py]}", "imports: unknown field; it belongs to an experiment"),
    ("{update: momentum, steps: 100}", "steps: unknown field; it belongs to an experiment"),
    ("{update: momentum, grad_clip: 1.0}", "grad_clip: unknown field; it belongs to an experiment"),
    ("{update: momentum, foreach: true}", "foreach: unknown field; no recipe has this option of torch's"),
    (
        "{update: [{kind: rms, storage: int8}]}",
        "update.rms.storage: unknown field; it goes to the top level of the recipe",
    ),
    ("{update: [{kind: momentum, lr: 0.1}]}", "update.momentum.lr: unknown field; it goes to the top level"),
    ("{base: soap, update.eigenbasis.refresh.steps: 1}", "refresh.steps: unknown field; dotted paths go under `set`"),
    ("{base: soap, overrides: [lr=1]}", "overrides: unknown field; `set: {dotted.path: value}` changes"),
    ("{update: sign, routes: [{name: a, update: sign, lr: 0.1}]}", "routes.a.lr: unknown field; `lr_ratio` multiplies"),
    ("{update: sign, routes: [{name: a, recipe: adamw}]}", "routes.a.recipe: unknown field; `update` has the stages"),
    # kinds
    ("{update: eigh}", "update.eigh: unknown stage kind 'eigh', which is a basis_solver and a root_solver"),
    ("{update: newton_schulz}", "unknown stage kind 'newton_schulz', which is a polar_solver"),
    ("{update: my_stage}", "update.my_stage: unknown stage kind 'my_stage' / --import FILE.py adds those of a file"),
    ("{update: RMS}", "update.RMS: unknown stage kind 'RMS'; did you mean 'rms'?"),
    ("{update: soap}", "update.soap: a stage is required, got the name of a recipe; write `base: soap`, or its stages"),
    ("{update: {kind: projected, rank: 4, inner: soap}}", "update.soap: a stage is required, got the name of a recipe"),
    (
        "{update: {kind: sum, paths: [{name: a, stages: [muon]}]}}",
        "update.muon: a stage is required, got the name of a",
    ),
    (
        "{update: {kind: graft, direction: sign, magnitude: rms, after: [soap]}}",
        "update.soap: a stage is required, got",
    ),
    (
        "{update: [momentum, {kind: eigenbasis, inner: adam}]}",
        "update.adam: a stage is required, got the name of a",
    ),
    (
        "{update: [{kind: spectral, solver: eigh}]}",
        "update.spectral.solver: unknown polar_solver kind 'eigh', which is",
    ),
    (
        "{update: [{kind: eigenbasis, inner: [momentum], solver: coupled_newton}]}",
        "update.eigenbasis.solver: unknown basis_solver kind 'coupled_newton', which is a root_solver",
    ),
    ("{update: momentum, constraints: clip_norm}", "unknown constraint kind 'clip_norm', which is a stage"),
    ("{update: momentum, averaging: ewma}", "averaging: unknown averaging kind 'ewma'; did you mean 'ema'?"),
    ("{update: momentum, weight_decay: l3}", "weight_decay: unknown weight_decay kind 'l3'; did you mean 'l2'?"),
    ("{update: momentum, view: heads}", "view: unknown view kind 'heads'"),
    ("{update: rms, storage: {second_moment: int7}}", "storage.second_moment: unknown quantizer kind 'int7'; did you"),
    # forms
    ("{update: {momentum: {beta: 0.9}}}", "update: a stage is required: / ({kind: momentum, ...})"),
    ("{update: {kind: [momentum, rms]}}", "update: unknown stage kind ['momentum', 'rms']"),
    ("{update: [[momentum, rms]]}", "update.0: a stage is required: "),
    ("{update: [momentum, null]}", "update.1: a stage is required: / got None"),
    ("{update: []}", "update: a stage is required ('identity' takes the gradient as it is), got none"),
    ("{update: [{kind: eigenbasis, inner: []}]}", "update.eigenbasis.inner: at least 1 item is required, got ()"),
    ("{update: [{kind: rms}, {kind: rms}]}", "update: stages of a chain need distinct names: give each 'rms' its own"),
    ("{update: momentum, weight_decay: 0.1}", "weight_decay: a weight_decay is required: / decoupled / got 0.1"),
    ("{update: momentum, blocking: 128}", "blocking: a mapping of fields is required, got 128"),
    ("{update: momentum, routes: adam}", "routes: a route is a mapping or the word 'default', and 'adam' is neither"),
    (
        "{update: momentum, routes: [{name: a, update: sign, match: head}]}",
        "routes.a.match: a mapping of fields is",
    ),
    ("{update: rms, storage: int8}", "storage: a mapping is required, got 'int8'"),
    ("{update: momentum, line_search: true}", "line_search: a mapping of fields is required, got True"),
    ("{update: momentum, sam: 0.05}", "sam: a mapping of fields is required, got 0.05"),
    ("{update: [{kind: momentum, beta: {start: 0.9, end: 1}}]}", "update.momentum.beta: a number, or a schedule with"),
    ("{update: [{kind: momentum, beta: {from: 0.9, to: 0.99}}]}", "update.momentum.beta: a schedule has from, to, and"),
    ("{base: soap, set: 3}", "set: a mapping of dotted paths to values is required, got 3"),
    ("{base: soap, set: {refresh.steps: 1}}", "no 'refresh' / did you mean 'update.eigenbasis.refresh'?"),
    ("{base: soap, set: {update.eigenbase.refresh.steps: 1}}", "did you mean 'eigenbasis'?"),
    (
        "{base: saop}",
        "base: recipe 'saop': a shipped recipe or the path of a .yaml file is required, did you mean 'soap'?",
    ),
    ("{base: 3}", "base: recipe: a name, path, mapping, list of stages or Recipe is required, got int"),
    # values
    ("{update: momentum, lr: -1}", "lr: input should be greater than or equal to 0, got -1"),
    ('{update: momentum, lr: "1e-3"}', "lr: input should be a valid number, got '1e-3'"),
    ("{update: [{kind: momentum, beta: 1.0}]}", "update.momentum.beta: input should be less than 1, got 1.0"),
    ("{update: [{kind: scale, rule: match_rm}]}", "update.scale.rule: input should be / 'match_rms' / got 'match_rm'"),
    (
        "{update: [{kind: shampoo, exponent: -0.25}]}",
        "update.shampoo.exponent: a number > 0 or a fraction such as '1/4'",
    ),
    (
        "{update: [{kind: shampoo, solver: newton_db, exponent: 1/8}]}",
        "update.shampoo.exponent: newton_db takes exponents 1/2 and 1/4, got 1/8; set another `exponent` / `solver`",
    ),
    (
        "{update: [{kind: shampoo, solver: cholesky}]}",
        "update.shampoo.exponent: cholesky takes exponents of 1 alone, got 1/4; set another `exponent` / newton_db",
    ),
    ("{update: momentum, routes: [default, default]}", "routes need distinct names, got 'adam' twice"),
    ('{update: sign, routes: [{name: a, update: sign, match: {name: "*.bias"}}]}', "a regular expression is required"),
    ("{update: sign, routes: [{name: a, update: sign, match: {role: hed}}]}", "routes.a.match.role / got 'hed'"),
    # what has no effect
    (
        "{update: rms, storage: {basis: int8}}",
        "storage: the role of a slot that can be coded is required / got 'basis'",
    ),
    (
        "{update: rms, storage: {second_moment: {kind: orthogonal, inner: int4}}}",
        "storage.second_moment: slots of role basis are required by orthogonal, which stores nothing else, got",
    ),
    (
        "{base: soap, storage: {first_moment: cholesky}}",
        "storage.first_moment: slots of role statistic or root are required by cholesky",
    ),
    ("{base: soap, storage: {iterate: int8}}", "storage: / iterates and counts are always stored / got 'iterate'"),
    ("{update: rms, storage: {update.rms/vv: int8}}", "storage: a slot of the stage is required (update.rms/v), got"),
    (
        "{update: momentum, expect: {rms: '>= 90% of parameters'}}",
        "expect: the path, name or kind of a stage, or a",
    ),
    ("{update: sign, view: {kind: matrices}}", "view: a stage that mixes entries is required, or it is idle"),
    (
        "{update: sign, routes: [{name: a, update: rms, match: {name: nothing}}]}",
        "routes.a: a rule must match at least one parameter, got none",
    ),
)
