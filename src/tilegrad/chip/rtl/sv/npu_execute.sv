// The execute unit: feeds the mesh and the vector lanes by a counter. What happens in a cycle of an
// instruction follows from `clock` (mesh) or from `row` and `phase` (vector lanes) alone.

module npu_execute #(
    parameter int ROWS        = 4,
    parameter int COLUMNS     = 4,
    parameter int SLOTS       = 4,
    parameter int ELEMENT     = 8,
    parameter int WEIGHT      = ELEMENT,
    parameter int FLOATING    = 0,
    parameter int SPARSE      = 0,
    parameter int SUMS_STAY   = 0,
    parameter int LANES       = 2,
    parameter int SCRATCH_ROW = 7,
    parameter int SUM_ROW     = 5,
    parameter int SLOT        = ELEMENT + (SPARSE != 0 ? 2 : 0)
) (
    input  logic                   clk,
    input  logic                   rst,
    input  logic                   begins,
    input  logic                   runs,
    input  logic [127:0]           word,
    output logic                   done,
    output logic                   first_read,
    output logic [SCRATCH_ROW-1:0] first_row,
    input  logic [SLOTS*SLOT-1:0]  first_q,
    output logic                   second_read,
    output logic [SCRATCH_ROW-1:0] second_row,
    input  logic [SLOTS*SLOT-1:0]  second_q,
    output logic                   sum_read,
    output logic [SUM_ROW-1:0]     sum_row,
    input  logic [COLUMNS*32-1:0]  sum_q,
    output logic                   write,
    output logic                   add,
    output logic [SUM_ROW-1:0]     write_row,
    output logic [COLUMNS*32-1:0]  d
);
  localparam int PLANES = 32 / ELEMENT;
  localparam int BEATS = COLUMNS / LANES;
  localparam int LANE = ELEMENT * (SPARSE != 0 ? 4 : WEIGHT != ELEMENT ? 2 : 1);
  localparam logic [7:0] TAKE = 8'd8, FROM_PLANES = 8'd9;

  logic signed [31:0] clock, count, rows;
  logic [31:0] phase, row;
  logic preload, matmul, reduce, takes, sparse, mixed;
  assign preload = word[3:0] == npu_words::OP_PRELOAD;
  assign matmul = word[3:0] == npu_words::OP_MATMUL;
  assign reduce = word[3:0] == npu_words::OP_REDUCE;
  assign takes = word[3:0] == npu_words::OP_VECTOR && (word[87:80] == TAKE || word[87:80] == FROM_PLANES);
  assign count = $signed({16'd0, word[79:64]});
  assign rows = preload ? $signed({16'd0, word[47:32]}) : $signed({20'd0, word[91:80]});
  assign sparse = SPARSE != 0 && word[15];
  assign mixed = WEIGHT != ELEMENT && runs && matmul && word[96];
  wire [31:0] local_row = {16'd0, word[31:16]};
  wire [31:0] other_row = {16'd0, word[47:32]};
  wire [31:0] result_row = {16'd0, word[63:48]};

  // Elements as the multipliers take them, and their indices. Weights that may be two in a place
  // come as they are.
  wire [SLOTS*ELEMENT-1:0] first_values, second_values, first_weights, second_weights;
  wire [SLOTS*2-1:0] first_index, second_index;
  genvar i;
  generate
    for (i = 0; i < SLOTS; i = i + 1) begin : g_slot
      if (FLOATING != 0) begin : g_float
        npu_half_clean #(.EXPONENT(FLOATING)) clean_first (
            .x(first_q[i*SLOT+:ELEMENT]), .y(first_values[i*ELEMENT+:ELEMENT]));
        npu_half_clean #(.EXPONENT(FLOATING)) clean_second (
            .x(second_q[i*SLOT+:ELEMENT]), .y(second_values[i*ELEMENT+:ELEMENT]));
      end else begin : g_integer
        assign first_values[i*ELEMENT+:ELEMENT] = first_q[i*SLOT+:ELEMENT];
        assign second_values[i*ELEMENT+:ELEMENT] = second_q[i*SLOT+:ELEMENT];
      end
      if (WEIGHT == ELEMENT) begin : g_same
        assign first_weights[i*ELEMENT+:ELEMENT] = first_values[i*ELEMENT+:ELEMENT];
        assign second_weights[i*ELEMENT+:ELEMENT] = second_values[i*ELEMENT+:ELEMENT];
      end else begin : g_mixed
        assign first_weights[i*ELEMENT+:ELEMENT] = first_q[i*SLOT+:ELEMENT];
        assign second_weights[i*ELEMENT+:ELEMENT] = second_q[i*SLOT+:ELEMENT];
      end
      if (SPARSE != 0) begin : g_index
        assign first_index[i*2+:2] = first_q[i*SLOT+ELEMENT+:2];
        assign second_index[i*2+:2] = second_q[i*SLOT+ELEMENT+:2];
      end else begin : g_no_index
        assign first_index[i*2+:2] = 2'd0;
        assign second_index[i*2+:2] = 2'd0;
      end
    end
  endgenerate

  // The mesh.
  logic load, clear, drain, feeds, tops;
  logic signed [31:0] late, steps, turn, preload_row, fed_row, out_row, ask_row;
  wire [ROWS*LANE-1:0] lanes;
  logic [COLUMNS*32-1:0] bottom;
  assign late = sparse && SUMS_STAY != 0 ? 32'sd1 : 32'sd0;
  assign steps = clock - late;  // of the second operand
  assign turn = clock - (count + ROWS + COLUMNS - 1 + late);  // of the drain
  assign preload_row = ROWS - 1 - clock;
  assign fed_row = ROWS - clock;
  assign load = runs && preload && clock > 0;
  assign clear = runs && matmul && SUMS_STAY != 0 && clock == 0 && !word[13];
  assign drain = runs && matmul && SUMS_STAY != 0 && word[14] && turn >= 0;
  assign feeds = runs && matmul && steps >= 1 && steps <= count;
  assign tops = SUMS_STAY != 0 ? feeds : load && fed_row < rows;
  assign out_row = SUMS_STAY != 0 ? ROWS - 1 - turn : clock - (ROWS + COLUMNS);
  assign ask_row = SUMS_STAY != 0 ? ROWS - 2 - turn : out_row + 1;

  generate
    for (i = 0; i < ROWS; i = i + 1) begin : g_lane
      logic [LANE-1:0] one;
      if (LANE == ELEMENT) begin : g_one
        assign one = first_values[i*ELEMENT+:ELEMENT];
      end else if (WEIGHT == ELEMENT) begin : g_first
        assign one = {{(LANE - ELEMENT) {1'b0}}, first_values[i*ELEMENT+:ELEMENT]};
      end else begin : g_mixed
        localparam int LOW = SUMS_STAY != 0 ? i : 2 * i;
        localparam int HIGH = SUMS_STAY != 0 ? ROWS + i : 2 * i + 1;
        always @* begin
          one = {LANE{1'b0}};
          one[ELEMENT-1:0] = mixed ? first_values[LOW*ELEMENT+:ELEMENT]
              : first_values[i*ELEMENT+:ELEMENT];
          if (mixed) one[ELEMENT+:ELEMENT] = first_values[HIGH*ELEMENT+:ELEMENT];
        end
      end
      if (SPARSE == 0) begin : g_dense
        assign lanes[i*LANE+:LANE] = feeds ? one : {LANE{1'b0}};
      end else begin : g_pairs
        logic [LANE-1:0] four;
        if (SUMS_STAY == 0) begin : g_still
          assign four = first_values[(i/2)*LANE+:LANE];
        end else begin : g_sums
          logic [2*ELEMENT-1:0] held;
          logic [LANE-1:0] group, whole;
          assign whole = {first_values[(ROWS+i)*ELEMENT+:ELEMENT], first_values[i*ELEMENT+:ELEMENT],
              held};
          assign four = steps[0] ? whole : group;
          always_ff @(posedge clk) begin
            held <= {first_values[(ROWS+i)*ELEMENT+:ELEMENT], first_values[i*ELEMENT+:ELEMENT]};
            if (feeds && steps[0]) group <= whole;
          end
        end
        assign lanes[i*LANE+:LANE] = !feeds ? {LANE{1'b0}} : sparse ? four : one;
      end
    end
  endgenerate

  npu_mesh #(
      .ROWS(ROWS), .COLUMNS(COLUMNS), .ELEMENT(ELEMENT), .WEIGHT(WEIGHT), .FLOATING(FLOATING),
      .SPARSE(SPARSE), .SUMS_STAY(SUMS_STAY)
  ) mesh (
      .clk(clk), .rst(rst), .load(load), .clear(clear), .drain(drain), .mixed(mixed), .left(lanes),
      .top(!tops ? {(COLUMNS * ELEMENT) {1'b0}} : SUMS_STAY != 0
          ? second_weights[COLUMNS*ELEMENT-1:0] : first_weights[COLUMNS*ELEMENT-1:0]),
      .top_index(!tops ? {(COLUMNS * 2) {1'b0}} : SUMS_STAY != 0
          ? second_index[COLUMNS*2-1:0] : first_index[COLUMNS*2-1:0]),
      .bottom(bottom));

  // The vector lanes.
  logic [31:0] planes, phases, held_first, held_second, beat;
  logic [COLUMNS*32-1:0] first, second, result;
  logic [LANES*32-1:0] part_first, part_second;
  wire [LANES*32-1:0] part_result;
  wire [COLUMNS*32-1:0] taken;
  logic vectors, beats;
  assign vectors = runs && !preload && !matmul;
  assign planes = word[87:80] == TAKE ? 32'd1 : PLANES;
  assign phases = takes ? planes + 32'd2 : BEATS + 4;
  assign held_first = word[12] ? 32'd0 : row;
  assign held_second = word[13] ? 32'd0 : row;
  assign beat = phase - 32'd3;
  assign beats = vectors && !takes && phase >= 32'd3 && phase < 32'd3 + BEATS;
  assign part_first = first[beat*LANES*32+:LANES*32];
  assign part_second = second[beat*LANES*32+:LANES*32];
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_vector
      logic [31:0] y, so_far, folded;  // a reduction goes from lane to lane
      if (i == 0) begin : g_first
        assign so_far = result[31:0];
      end else begin : g_next
        assign so_far = g_vector[i-1].folded;
      end
      npu_vector_lane #(.FLOATING(FLOATING)) lane (
          .kind(reduce ? (word[87:80] == 8'd0 ? 8'd0 : 8'd2) : word[87:80]),
          .shift(reduce ? 6'd0 : word[93:88]),
          .a(reduce ? so_far : part_first[i*32+:32]),
          .b(reduce ? part_first[i*32+:32] : part_second[i*32+:32]), .y(y));
      assign part_result[i*32+:32] = y;
      assign folded = beat * LANES + i < {16'd0, word[111:96]} ? y : so_far;
    end
    for (i = 0; i < COLUMNS; i = i + 1) begin : g_take
      logic [31:0] joined;
      if (FLOATING != 0) begin : g_float
        logic [31:0] wide, clean_word;
        npu_half_wide #(.EXPONENT(FLOATING)) widen (.x(first_values[i*ELEMENT+:ELEMENT]), .y(wide));
        npu_fp32_clean clean (.x(joined), .y(clean_word));
        assign taken[i*32+:32] = planes == 32'd1 ? wide : clean_word;
        assign joined = phase == 32'd1 ? {16'd0, first_q[i*SLOT+:ELEMENT]}
            : {first_q[i*SLOT+:ELEMENT], result[i*32+:16]};
      end else begin : g_integer
        assign joined = (phase == 32'd1 ? 32'd0 : result[i*32+:32])
            | ({24'd0, first_q[i*SLOT+:ELEMENT]} << {phase - 32'd1, 3'd0});
        assign taken[i*32+:32] = planes == 32'd1
            ? {{24{first_q[i*SLOT+ELEMENT-1]}}, first_q[i*SLOT+:ELEMENT]} : joined;
      end
      always_ff @(posedge clk) begin
        if (vectors && takes && phase >= 32'd1 && phase <= planes)
          result[i*32+:32] <= FLOATING != 0 && phase != planes ? joined : taken[i*32+:32];
        else if (vectors && reduce && phase == 32'd2)
          result[i*32+:32] <= word[87:80] == 8'd0 ? 32'd0
              : FLOATING != 0 ? 32'hff800000 : 32'h80000000;
        else if (beats && reduce) result[i*32+:32] <= g_vector[LANES-1].folded;
        else if (beats && beat == i / LANES)
          result[i*32+:32] <= part_result[(i%LANES)*32+:32];
      end
    end
  endgenerate
  logic [31:0] value;
  generate
    if (FLOATING != 0) begin : g_value
      npu_fp32_clean clean (.x(word[127:96]), .y(value));
    end else begin : g_plain_value
      assign value = word[127:96];
    end
  endgenerate
  always_ff @(posedge clk) begin
    if (vectors && !takes && phase == 32'd1) first <= sum_q;
    if (vectors && !takes && phase == 32'd2) second <= !reduce && word[14] ? {COLUMNS{value}} : sum_q;
  end

  // Counters.
  always @* begin
    if (preload) done = clock == ROWS;
    else if (matmul && SUMS_STAY == 0) done = clock == count + ROWS + COLUMNS - 1;
    else if (matmul) done = turn == (word[14] ? ROWS - 1 : -1);
    else done = phase + 32'd1 == phases && row + 32'd1 == $unsigned(count);
  end
  always_ff @(posedge clk) begin
    if (rst || begins) begin
      clock <= 32'd0;
      phase <= 32'd0;
      row <= 32'd0;
    end else if (runs) begin
      clock <= clock + 32'd1;
      if (vectors) begin
        phase <= phase + 32'd1 == phases ? 32'd0 : phase + 32'd1;
        if (phase + 32'd1 == phases) row <= row + 32'd1;
      end
    end
  end

  // Ports of the memories.
  logic [31:0] first_at, second_at, sum_at, write_at;
  always @* begin
    if (preload) begin
      first_read = runs && preload_row >= 0 && preload_row < rows;
      first_at = local_row + $unsigned(preload_row);
    end else if (matmul) begin
      first_read = runs && clock < count;
      first_at = local_row + $unsigned(clock);
    end else begin
      first_read = vectors && takes && phase < planes;
      first_at = local_row + held_first * planes + phase;
    end
    second_read = SUMS_STAY != 0 && runs && matmul && steps >= 0 && steps < count;
    second_at = other_row + $unsigned(steps);
    if (matmul) begin
      sum_read = runs && word[12] && ask_row >= 0
          && (SUMS_STAY != 0 ? word[14] && turn >= -1 && ask_row < rows : ask_row < count);
      sum_at = result_row + $unsigned(ask_row);
      write = runs && (SUMS_STAY != 0 ? word[14] && turn >= 0 && out_row < rows : out_row >= 0);
      write_at = result_row + $unsigned(out_row);
    end else begin
      sum_read = vectors && !takes && (phase == 32'd0 || (phase == 32'd1 && !reduce));
      sum_at = phase == 32'd0 ? local_row + held_first : other_row + held_second;
      write = vectors && phase + 32'd1 == phases;
      write_at = result_row + row;
    end
  end
  assign add = matmul && word[12];
  assign d = matmul ? bottom : result;
  assign first_row = first_at[SCRATCH_ROW-1:0];
  assign second_row = second_at[SCRATCH_ROW-1:0];
  assign sum_row = sum_at[SUM_ROW-1:0];
  assign write_row = write_at[SUM_ROW-1:0];
  wire unused = &{1'b0, word[11:4], first_at[31:SCRATCH_ROW], second_at[31:SCRATCH_ROW],
      sum_at[31:SUM_ROW], write_at[31:SUM_ROW], second_values, second_index, first_index,
      first_values, first_weights, second_weights, word[95:94]};
`ifdef FORMAL
  always_ff @(posedge clk) if (!rst && runs && matmul) begin
    assert (clock >= 0 && clock <= count + 2 * ROWS + COLUMNS);
  end
`endif
endmodule
