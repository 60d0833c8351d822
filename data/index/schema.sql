-- What only the index uses, after the tables of data/index/tables.py. The index is derived from the runs' segments: it can
-- be deleted at any time and is rebuilt when next opened.

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

-- The files of records, and the files of an experiment as one, `experiment`, as they were when they were read: inode, size
-- and time, of an experiment the sums and the latest time. All are 0 if the file could not be read, or of an experiment
-- that is still being measured.
CREATE TABLE record_file (
    run_id        VARCHAR,
    file          VARCHAR,
    inode         UBIGINT,
    size          BIGINT,
    mtime_ns      BIGINT,
    lines         BIGINT,               -- that were read
    stop          BIGINT,               -- the byte after them
    problem       VARCHAR,              -- what is damaged, null if nothing is
    PRIMARY KEY (run_id, file)
);

-- How far each of the CUBES of data/index/intake.py is summed up. `schema` there creates the other tables of each cube.
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
