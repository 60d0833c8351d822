-- The index of a root. Derived from the runs' segments: it can be deleted at any time and is rebuilt when next opened.
-- Units: counts are elements, nbytes and bytes are bytes, times are in UTC, sqnr_db is in decibels, fractions are 0 to 1.

CREATE TABLE run (
    run_id        VARCHAR PRIMARY KEY,
    model         VARCHAR,
    size          VARCHAR,              -- tiny, full
    dataset       VARCHAR,
    recipe        VARCHAR,
    state         VARCHAR,              -- running, done, failed, cancelled, crashed
    reason        VARCHAR,              -- why it failed or crashed, else null
    device        VARCHAR,
    backend       VARCHAR,              -- what quantized the GEMM operands: torch, or triton with its version, such as triton 3.4.0 (compiled)
    started       TIMESTAMP,
    finished      TIMESTAMP,            -- null while running
    iteration     BIGINT,               -- last iteration finished, warm-up not counted; -1 before the first
    iterations    BIGINT,               -- requested iterations, warm-up not counted
    tensors       BIGINT,               -- tensors recorded
    tensors_without_raw BIGINT,         -- of these, the tensors whose values were not kept
    bytes         BIGINT,               -- size of the tensor files
    loss_first    DOUBLE,               -- cross entropy in nats per token
    loss_last     DOUBLE,
    config        VARCHAR,              -- the contents of run.json
    name          VARCHAR,              -- name, color (#rrggbb) and note given by users, else null
    color         VARCHAR,
    note          VARCHAR,
    first_step    VARCHAR,              -- the first line of loss.jsonl: iteration, hashes of its data and of the weights; null without one
    damage        VARCHAR               -- a sentence that says what is damaged on disk; the other tables then have no rows for the run
);

CREATE TABLE tensor (
    key           INTEGER,              -- number of the tensor in the order of indexing; exists only in the index
    tensor_id     VARCHAR NOT NULL,     -- unique; checked during indexing
    run_id        VARCHAR,
    model         VARCHAR,
    size          VARCHAR,
    dataset       VARCHAR,
    recipe        VARCHAR,
    quant_type    VARCHAR,              -- the spec or the recipe that was requested where the tensor was captured
    layer_type    VARCHAR,              -- attention, linear; null for a tensor outside the GEMMs
    layer_index   INTEGER,              -- from 1
    module        VARCHAR,              -- qkv proj fc1 fc2 core router shared_fc1 shared_fc2 q q_down q_up kv_down kv_up, or a name from the path of the module
    component     VARCHAR,              -- FA (attention), linear; null for a tensor outside the GEMMs
    operation     VARCHAR,              -- forward, backward, evaluation, optimizer
    phase         VARCHAR,              -- pre: input of the operation, post: output of it
    tensor_name   VARCHAR,
    iteration     BIGINT,               -- from 0
    micro_batch   INTEGER,              -- from 0
    rank          INTEGER,              -- from 0
    expert        INTEGER,              -- from 0; null outside experts
    captured      TIMESTAMP,            -- for an imported tensor: the time in its log, whose time zone is unknown
    shape         BIGINT[],
    dtype         VARCHAR,
    numel         BIGINT,
    nbytes        BIGINT,               -- numel times the dtype's size
    path          VARCHAR,              -- tensor file: relative to the run's directory, for an imported tensor absolute; null if not kept
    sha256        VARCHAR,              -- of the tensor file; for an imported tensor: when it was imported
    contracted_axis INTEGER,            -- for an operand: the axis that its GEMM contracts, from the end (-1 is the last); else null
    min           DOUBLE,               -- moments are over the finite elements
    max           DOUBLE,
    mean          DOUBLE,
    std           DOUBLE,               -- of the population
    rms           DOUBLE,
    absmax        DOUBLE,
    absmin        DOUBLE,               -- smallest nonzero magnitude
    skewness      DOUBLE,
    kurtosis      DOUBLE,               -- E(x-mean)^4 / std^4: 3 for a normal distribution
    zeros         BIGINT,
    nans          BIGINT,
    infs          BIGINT,
    tp_rank       INTEGER,              -- number of the tensor-parallel rank, 0 to tp_size - 1
    tp_size       INTEGER,
    dp_rank       INTEGER,              -- number of the data-parallel replica
    shard         VARCHAR,              -- how to restore the unsharded tensor: whole, slice (join along shard_axis), partial (sum)
    shard_axis    INTEGER,              -- from the end if negative; null unless shard is slice
    shard_stride  INTEGER,              -- number of tensors along the axis, each sharded separately: 2 for gate and up
    recomputed    BOOLEAN,              -- its layer's forward pass ran again during the backward pass; null if not known
    tokens_left_out INTEGER,            -- padding, which statistics, sketch and errors leave out; null without a mask
    pairs_left_out BIGINT,              -- pairs of query and key that the softmax does not see, which statistics, sketch and errors leave out; null without a mask
    source_version VARCHAR,             -- for an imported tensor: the tool that logged it; for the Megatron fork, the naming of its file, V0 to V7
    original_quant_type VARCHAR,        -- for an imported tensor: the quant type as spelled in its log
    stage         VARCHAR,              -- before, after: whether it was taken before or after quantization, according to its log
    corrections   VARCHAR,              -- one sentence per line: which entries of the log were corrected, and why
    file_key      VARCHAR,              -- the tensor's key in a file that contains several
    module_path   VARCHAR,              -- for an imported tensor: the path of its module in the model, if its tool names it
    execution_order BIGINT,             -- for an imported tensor: its place in the order of execution; null if not known
    file_size     BIGINT,               -- for an imported tensor: bytes of its file when it was imported
    file_time_ns  BIGINT,               -- for an imported tensor: when its file had last changed, in nanoseconds since 1970
    gemm          VARCHAR,              -- forward, dgrad, wgrad: the GEMM that contracted_axis and format refer to, or whose result it is
    result_sqnr_db DOUBLE,              -- for a result: compared with the same GEMM on unrounded operands
    format        VARCHAR,              -- the exact format this operand was rounded to; null for results and bf16
    tensor_scale  DOUBLE,               -- what all values were multiplied by before they were rounded to format, where one number scales the whole tensor
    noise_seed    BIGINT,               -- of stochastic rounding; null without it
    sign_seed     BIGINT,               -- of the random signs of a rotation; null without them
    sqnr_db       DOUBLE,               -- this and the next columns: the error of rounding to format; null if format is null
    mse           DOUBLE,
    relative_error DOUBLE,
    cosine        DOUBLE,
    projection    DOUBLE,
    max_abs_error DOUBLE,
    flush_to_zero DOUBLE,               -- of the nonzero elements
    underflow_of_all DOUBLE,            -- the same, of all elements
    saturated     DOUBLE,               -- of all elements
    flushed_error_share DOUBLE,         -- of the squared error: of the elements that become 0; null if there is no error
    saturated_error_share DOUBLE,       -- the same, of those that saturate
    sketch_start  BIGINT,               -- rows sketch_start to sketch_stop - 1 of the sketches of its segment; null without a sketch
    sketch_stop   BIGINT,               -- see sketch_start; both exist only in the index
    -- an axis must be one that the shape has: pages rely on this
    CHECK (contracted_axis IS NULL OR (shape IS NULL AND path IS NULL)  -- of logged statistics, the shape may be unknown
           OR coalesce(contracted_axis BETWEEN -len(shape) AND len(shape) - 1, false)),
    CHECK (shard_axis IS NULL OR coalesce(shard_axis BETWEEN -len(shape) AND len(shape) - 1, false))
);

-- The binade sketch: bin is the top 12 bits of the value as IEEE binary32; finite values only. The rows stay in the
-- segments, and queries read them from there under this name (data/sketches.py); the index has no such table.
CREATE TABLE sketch (
    key           INTEGER,
    bin           SMALLINT,
    count         BIGINT
);

-- The error of each format on a tensor, with blocks along the axis that the GEMM contracts. A tensor may enter several GEMMs.
CREATE TABLE score (
    key           INTEGER,
    format        VARCHAR,
    gemm          VARCHAR,              -- forward, dgrad, wgrad; null if not known
    used          BOOLEAN,              -- whether that GEMM used the tensor in this format
    second_sqnr_db DOUBLE,              -- of an operand that the GEMM rounded from its rounded forward value: of this rounding alone, while sqnr_db and the others are of both; null for others, and in a row that ranks merged
    tensor_scale  DOUBLE,               -- this and the next two: as in tensor, for a used format; else null
    noise_seed    BIGINT,
    sign_seed     BIGINT,
    sqnr_db       DOUBLE,
    mse           DOUBLE,
    relative_error DOUBLE,
    cosine        DOUBLE,
    projection    DOUBLE,
    max_abs_error DOUBLE,
    flush_to_zero DOUBLE,
    underflow_of_all DOUBLE,
    saturated     DOUBLE,
    flushed_error_share DOUBLE,
    saturated_error_share DOUBLE
);

-- Histograms over the blocks of an operand in a format; quant.block_histograms defines the bins.
CREATE TABLE block (
    key           INTEGER,
    format        VARCHAR,
    measure       VARCHAR,              -- scale_exponent, sqnr_db, crest_db
    bin           SMALLINT,
    count         BIGINT                -- how many blocks
);

-- What is recorded to follow a tensor over iterations: see quant.traces.
CREATE TABLE trace (
    key           INTEGER,
    hot_channels  INTEGER[],            -- the channels (indices of the last axis) with the largest absmax, hottest first
    hot_ratio     DOUBLE,               -- the largest absmax of a channel divided by the median one
    sampled       FLOAT[],              -- for a rounded weight: values at fixed positions
    sampled_rounded FLOAT[],            -- the same values after rounding
    at_bin_edge   DOUBLE                -- share of the weights that lie at the edge of their bin
);

-- Measured effects: what rounding one group of products does to the loss, on the same weights and sequences. Rows are of
-- runs of `binade measure`, from their effects.jsonl.
CREATE TABLE effect (
    run_id        VARCHAR,
    format        VARCHAR,              -- what the group was rounded to: a spec, or a recipe
    recipe_sha256 VARCHAR,              -- of what that rounds, the same for files with the same tables; null if unknown
    part          VARCHAR,              -- linear, router, qk, pv, product; null for all
    layer_index   INTEGER,              -- from 1; null for all layers
    module        VARCHAR,              -- null for all modules
    sequences     INTEGER,              -- how many were measured
    loss          DOUBLE,               -- mean cross entropy without rounding, in nats per token
    change        DOUBLE,               -- mean of the loss with the group rounded minus that without, in nats per token
    change_error  DOUBLE,               -- its standard error over sequences; null for one sequence
    divergence    DOUBLE,               -- mean KL divergence of the next token's distribution, in nats; null if not measured
    change_by_sequence DOUBLE[],
    divergence_by_sequence DOUBLE[],
    seconds       DOUBLE                -- what its passes took
);

-- The indexed segments. A segment whose mtime_ns has changed was replaced. Those that were merged later each have a row
-- with the name of the merged one.
CREATE TABLE segment (
    number        INTEGER,              -- the key of its first tensor
    run_id        VARCHAR,
    name          VARCHAR,
    mtime_ns      BIGINT,
    shift         BIGINT,               -- how many rows of sketch.parquet are before its own: 0 unless it was merged
    sketch_rows   BIGINT                -- how many it has
);

-- How far each of the CUBES of data/intake.py is summed up. `schema` there creates the other tables of each cube.
CREATE TABLE cube (
    name          VARCHAR,
    upto          INTEGER,              -- the tensors with keys below this one are summed up
    tried         INTEGER,              -- the next free key at the last attempt
    merged        BIGINT,               -- rows of its sums right after they were last merged
    size          BIGINT                -- rows of the table of this name
);

-- The 10th percentile, the median and the 90th percentile of values that are not NaN, for `unbounded`. One aggregate: each
-- keeps a copy of all values in memory.
CREATE MACRO deciles_of(x) AS
    quantile_cont(greatest(least(x, 1e300), -1e300), [0.1, 0.5, 0.9]) FILTER (NOT isnan(x));
-- Infinite where a quantile lies among infinite values.
CREATE MACRO unbounded(x) AS
    CASE WHEN x > 1e200 THEN 'inf'::DOUBLE WHEN x < -1e200 THEN '-inf'::DOUBLE ELSE x END;
