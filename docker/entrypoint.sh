#!/usr/bin/env bash
# Which process does a container of the sparkdl image run? Its first argument says it:
#
#   master, worker, history   Spark's own server, in the foreground; further arguments are its own
#   folders PATH...           no server: makes folders that everybody may write to, on HDFS
#   driver, executor          what Spark on Kubernetes asks its pods to run
#   anything else             that command, for example spark-submit or jupyter lab
#
# It runs outside containers too, where pyspark's Python is the first of the PATH.
set -euo pipefail

export SPARK_HOME=${SPARK_HOME:-$(find_spark_home.py)}
spark_class=$SPARK_HOME/bin/spark-class

folders() {
    local shell=("$spark_class" org.apache.hadoop.fs.FsShell)
    "${shell[@]}" -mkdir -p "$@"
    "${shell[@]}" -chmod 1777 "$@"
}

# The contract is Spark's own: BasicExecutorFeatureStep sets these variables in the pod.
executor() {
    local class_path="${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*" options=()
    class_path="${SPARK_CONF_DIR:-$SPARK_HOME/conf}:$class_path"
    class_path="${HADOOP_CONF_DIR:+$HADOOP_CONF_DIR:}$class_path"
    mapfile -t options < <(env | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n | cut -d= -f2-)
    exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$class_path" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
        --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
        --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
        --podName "$SPARK_EXECUTOR_POD_NAME"
}

part=${1:?"name what to run: master, worker, history, folders, driver, executor, or a command"}
shift
case $part in
master) exec "$spark_class" org.apache.spark.deploy.master.Master "$@" ;;
worker) exec "$spark_class" org.apache.spark.deploy.worker.Worker "$@" ;;
history) exec "$spark_class" org.apache.spark.deploy.history.HistoryServer "$@" ;;
folders) folders "$@" ;;
driver)
    exec "$SPARK_HOME/bin/spark-submit" \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" \
        --deploy-mode client "$@"
    ;;
executor) executor ;;
*) exec "$part" "$@" ;;
esac
