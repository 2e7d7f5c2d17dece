"""What the README promises, and the one test on real processes that proves each promise.

``make test`` runs these tests however long they take, and fails where one of them was not run.
``python -m tests.promises`` prints the table. A new promise is a row here.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROMISES = {
    # Exact
    "two workers get the gradient of one process that is fed both their batches":
        "tests/equivalence/test_allreduce_equals_one_process.py::test_equals_one_process[even]",
    "every row is used exactly once an epoch":
        "tests/data/sources/test_parquet.py::test_the_ranks_use_every_row_once_and_get_equally_many[3-rows0]",
    # Fault tolerant
    "a lost worker of a gang changes no bit":
        "tests/cluster/test_recovery.py::test_a_lost_worker_changes_no_bit[KillWorker-1-12]",
    "a lost executor under a gang changes no bit":
        "tests/cluster/test_recovery.py::test_a_lost_worker_changes_no_bit[KillExecutor-0-12]",
    "a worker that hangs is replaced":
        "tests/cluster/test_recovery.py::test_a_lost_worker_changes_no_bit[StopWorker-1-12]",
    "a lost worker in rounds is a task that Spark runs again":
        "tests/cluster/test_rounds_recovery.py::test_spark_runs_a_lost_task_alone[KillWorker-3-8]",
    "a lost executor in rounds changes no bit":
        "tests/cluster/test_rounds_recovery.py::test_spark_runs_a_lost_task_alone[KillExecutor-2-11]",
    # Plain Spark
    "the twenty lines: fit in a gang, summary, transform, save":
        "tests/docs/test_python_blocks.py::"
        "test_the_twenty_lines_are_a_program_that_prints_what_it_is_asked_for",
    "an estimator goes into a Pipeline, and is saved and loaded with it":
        "tests/test_estimator.py::test_pipeline_with_save_and_load",
    "an estimator goes into a CrossValidator":
        "tests/test_estimator.py::test_cross_validator_in_parallel",
    "rounds need no gang and train as a gang does":
        "tests/spark/rounds/test_averaging_rounds.py::test_rounds_are_what_a_gang_does",
    "Spark Connect trains too, and goes on after a lost worker":
        "tests/test_connect.py::test_a_lost_worker_changes_no_bit",
    "data, checkpoints and models may lie on HDFS":
        "tests/hdfs/test_fit.py::test_in_a_gang_a_killed_worker_and_a_torn_checkpoint_change_no_bit",
    # Models
    "transform adds the predictions":
        "tests/test_model.py::test_classifier_adds_three_columns",
    "evaluate gives the metrics in one pass":
        "tests/spark/inference/test_evaluate_model.py::"
        "test_a_classifier_is_evaluated_as_scikit_learn_does",
    "scores gives the loss of each row":
        "tests/spark/inference/test_evaluate_model.py::test_each_row_has_its_loss",
    "setOutputs adds what a layer computes":
        "tests/spark/inference/test_output_columns.py::test_every_kind_of_output_at_once",
    "training starts from other weights":
        "tests/spark/fit/test_fine_tuning.py::"
        "test_training_starts_from_a_model_a_folder_or_a_file",
    "a saved model is a module where Spark is not installed":
        "tests/serialization/test_load.py::test_it_works_where_pyspark_cannot_be_imported",
    "a model can become an ONNX file":
        "tests/serialization/test_onnx_export.py::test_a_fitted_model_names_its_inputs_after_its_columns",
    # Data and training
    "text is trained on":
        "tests/test_data_kinds.py::test_text_is_tokenized_padded_and_grouped",
    "more data than memory holds":
        "tests/data/spool/test_mapped.py::test_windows_bound_the_memory_of_training",
    "workers read Parquet files by themselves":
        "tests/spark/frames/test_sources.py::"
        "test_no_spark_job_reads_the_data_and_transform_sees_it_as_training_did",
    "a LightningModule trains as it is":
        "tests/test_other_modules.py::test_a_lightning_module_trains_and_predicts",
    "a search finds hyperparameters":
        "tests/cli/test_tune_job.py::test_parameters_history_and_model_of_each_trial_are_kept",
    # Around a fit
    "a notebook runs from top to bottom and shows its fits":
        "tests/notebooks/test_notebooks.py::test_it_runs[01_quickstart]",
    "the stop button ends a fit and cleans up":
        "tests/notebooks/test_interrupting.py::test_the_stop_button[gang]",
    "explain tells what a fit will do and how long it takes":
        "tests/spark/explain/test_explain_fit.py::test_all_that_was_measured_has_times",
    "reportDir leaves a page of each fit":
        "tests/docs/test_python_blocks.py::test_the_blocks_of_a_page_run[docs/reports.md]",
    "sparkdl ui shows the runs":
        "tests/cli/test_ui_command.py::test_it_serves_until_ctrl_c",
    "TorchRunner runs a function of one's own on all workers":
        "tests/test_runner.py::test_a_function_trains_on_the_rows_of_a_data_frame[2]",
    "a job of a TOML file trains and says what it reached":
        "tests/docs/test_commands.py::test_jobs_run[train digits]",
    "sparkdl doctor looks whether a cluster can train":
        "tests/cli/doctor/test_cluster_checks.py::test_a_session_that_can_train",
    "the wheel brings neither torch nor pyspark":
        "tests/packaging/test_clean_environment.py::test_neither_torch_nor_pyspark_come_along",
}  # fmt: skip
"""Promise -> its proof."""


def is_there(proof: str) -> bool:
    """Whether the file of a proof has a test of that name; only a run tells of its parameters."""
    path, _, name = proof.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return name.partition("[")[0] in names


if __name__ == "__main__":
    for promise, proof in PROMISES.items():
        print(f"{promise}\n    {proof}")
