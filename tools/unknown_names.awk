# Prints what mypy, whose report this reads, says about modules, names, attributes and arguments that do not exist; fails if there are any, or if
# mypy did not finish.  Other complaints about types are left out.

/: note: / || /does not explicitly export/ { next }

/\[[a-z-]+\]$/ && !/\[(attr-defined|call-arg|import-not-found|name-defined)\]$/ { next }

# mypy takes every argument after a list with a star for one too many.
/Too many/ {
    for (line = 0; line < $2; line++) getline code < $1
    close($1)
    if (code ~ /\*/) next
}

/^Success/ || /^Found .*\(checked/ { finished = 1; next }

{ print; found = 1 }

END { exit found || !finished }
