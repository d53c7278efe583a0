# The end of what `difftrain completion bash` prints; before it stand the functions with the words.
_difftrain() {
  local line="${COMP_LINE:0:COMP_POINT}" topic flag="" prefix="" what="" choices
  local cur="${line##*[[:space:]]}"
  local -a before
  read -r -a before <<< "${line%"$cur"}"
  topic="${before[1]-}"
  if [[ -n "${before[2]-}" && -n "$(_difftrain_flags "$topic ${before[2]}")$(_difftrain_words "$topic ${before[2]}")" ]]; then
    topic="$topic ${before[2]}"
  fi
  # the value of a flag: behind "=", at which bash cuts words, or as the next word
  if [[ "$cur" == --*=* ]]; then
    flag="${cur%%=*}"
    cur="${cur#*=}"
    [[ "$COMP_WORDBREAKS" == *=* ]] || prefix="$flag="
  elif [[ "${before[-1]}" == --* && "$cur" != -* ]]; then
    flag="${before[-1]}"
  fi
  if [[ -n "$flag" ]]; then
    what="$(_difftrain_values "$topic $flag")"
    [[ "$what" == @switch ]] && flag=""
  fi
  COMPREPLY=()
  if [[ "$what" == @number ]]; then
    return
  elif [[ -n "$flag" && -n "$what" ]]; then
    mapfile -t COMPREPLY < <(compgen -P "$prefix" -W "$what" -- "$cur")
    return
  elif [[ -z "$flag" ]]; then
    [[ "$cur" == -* ]] && choices="$(_difftrain_flags "$topic")" || choices="$(_difftrain_words "$topic")"
    mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$cur")
    [[ "${COMPREPLY[0]-}" == *= ]] && compopt -o nospace 2>/dev/null
    [[ ${#COMPREPLY[@]} -gt 0 || "$cur" == -* || -z "$topic" ]] && return
  fi
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen -P "$prefix" -f -- "$cur")
}
complete -F _difftrain difftrain
