# PostgreSQL's server and its client pgbench, for the workloads that source this file after /lab/serial. A workload may set
# `data`, where the database is or is made, and more options in `initdb_options` and `server_options`.

data=${data:-/srv/database}
programs=$(echo /usr/lib/postgresql/*/bin)
ram=$(ram_mib)

# The server refuses to be root.
as_postgres() {
    setpriv --reuid=postgres --regid=postgres --clear-groups "$@"
}

doing='initdb'
if [ ! -e "$data" ]; then
    install -d -o postgres -g postgres "$data"
    as_postgres "$programs/initdb" --pgdata="$data" --auth=trust --no-sync --no-instructions \
        ${initdb_options:-} >/dev/null
fi

# Data, log and cache share the RAM: the data may take a seventh of it.
doing='starting the server'
as_postgres "$programs/postgres" -D "$data" -k /tmp -c listen_addresses= \
    -c shared_buffers="$((ram / 8))MB" -c min_wal_size=32MB -c max_wal_size="$((ram / 8))MB" \
    -c log_min_messages=fatal ${server_options:-} &
tries=0
until "$programs/pg_isready" --quiet --host=/tmp --username=postgres; do
    tries=$((tries + 1))
    [ "$tries" -lt 300 ]
    sleep 1
done

# Its output while all goes well is not for the serial port.
pgbench() {
    as_postgres "$programs/pgbench" --host=/tmp "$@" postgres >/tmp/pgbench.said 2>&1 || {
        tail -n 5 /tmp/pgbench.said >&2
        return 1
    }
}
