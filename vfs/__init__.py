"""The dataset view: the job's global sample order as files."""
