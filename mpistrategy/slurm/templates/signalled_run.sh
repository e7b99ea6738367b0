# The program runs behind this shell, which is told by a signal that the time is nearly up, and tells the program. (In
# front of it, the shell would deal with the signal only after the program has ended.)
told='' step=''
trap 'told=yes; echo "job $SLURM_JOB_ID: the time is nearly up, $(date -Is)"
    [[ ! $step ]] || kill -USR2 "$step" || true' USR2 # srun hands it on to all ranks
"${launch[@]}" python3 -m mpistrategy run "${program[@]}" &
step=$!
status=0
wait "$step" || status=$?
trap '' USR2
if [[ $told ]]; then # the signal cut that wait short; 127: it did not
    again=0
    wait "$step" 2>/dev/null || again=$?
    ((again == 127)) || status=$again
fi
